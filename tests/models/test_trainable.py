"""A small version of every network in Python learns: a step along the gradient lowers the loss."""

from __future__ import annotations

from functools import partial
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn
from flax.traverse_util import flatten_dict

from pipeline.core.registry import list_components
from pipeline.models.modules.network import Network
from tests.models.build import (
    QUICK,
    conf_model,
    draw_variables,
    parameters,
    random,
    without_draws,
)

RESNET = {"blocks": [1, 1], "widths": [4, 8]}
SQUEEZENET = {"stem_features": 8, "squeezes": [2, 2, 4], "pool_after": [2]}
VGG = {"convs": [1, 1], "widths": [4, 6], "hidden": 32}
DPN = {"stem": 4, "width": 8, "inner": 4, "groups": 2, "blocks": [2, 1], "growths": [2, 3]}
SHUFFLENET = {"stem": 4, "units": [2], "widths": [8], "last": 8}
STAGES = {"stem": 4, "blocks": [1, 2], "widths": [8, 8]}
ENCODER = {"features": 8, "hidden": 12, "heads": 2, "blocks": 1}
WIDE_RESNET = {**RESNET, "stem_width": 2, "dropout": 0.3}
WIDE_DEEP = {"vocabulary": 20, "embedding": 3, "hidden": [8, 4]}

SMALL: dict[str, tuple[dict[str, Any], tuple[int, ...]]] = {
    "alexnet": ({"hidden": 8}, (63, 63, 3)),
    "bert_base": ({**ENCODER, "vocabulary": 20}, (6,)),
    "densenet121": ({"growth": 4, "blocks": [1, 2]}, (32, 32, 3)),
    "dpn92": (DPN, (32, 32, 3)),
    "efficientnet_b0": ({"width": 0.1, "depth": 0.1}, (64, 64, 3)),
    "googlenet": ({"width": 0.06}, (64, 64, 3)),
    "gpt2": (ENCODER, (6,)),
    "inception_v3": ({"width": 0.06}, (75, 75, 3)),
    "mobilenet_v1": ({"width": 0.1}, (48, 48, 3)),
    "mobilenet_v2": ({"width": 0.1}, (48, 48, 3)),
    "mobilenet_v3_small": ({"width": 0.1}, (48, 48, 3)),
    "regnet_x_800mf": ({**STAGES, "group_width": 4}, (32, 32, 3)),
    "repvgg_a0": (STAGES, (32, 32, 3)),
    "resnet50": (RESNET, (32, 32, 3)),
    "resnetv2_50": ({**RESNET, "stem_width": 4}, (32, 32, 3)),
    "resnext50_32x4d": ({**RESNET, "groups": 2, "group_width": 32}, (32, 32, 3)),
    "se_resnet18": ({**RESNET, "squeeze": 2}, (32, 32, 3)),
    "shufflenet_v2_x0_5": (SHUFFLENET, (32, 32, 3)),
    "squeezenet_residual": (SQUEEZENET, (48, 48, 3)),
    "unet": ({"widths": [4, 6]}, (8, 8, 3)),
    "vgg16": (VGG, (16, 16, 3)),
    "vgg16_bn": (VGG, (16, 16, 3)),
    "vit_tiny": ({**ENCODER, "patch": 4}, (8, 8, 3)),
    "wide_deep": (WIDE_DEEP, (5, 2)),
    "wide_resnet40_10": (WIDE_RESNET, (8, 8, 3)),
    "xception": ({"width": 0.01, "middle": 1}, (71, 71, 3)),
}
"""By the file that it is a version of: what is smaller, and the images."""

KEPT = {
    "efficientnet_b0": {"stage1_block0", "stage2_block0"},
    "googlenet": {"inception3a"},
    "inception_v3": {"square0", "reduction0", "factored0", "reduction1", "expanded0"},
    "mobilenet_v2": {"stage0_block0", "stage1_block0", "stage1_block1"},
    "mobilenet_v3_small": {"block0", "block1", "block2", "block3"},
}
"""Of networks of many blocks: those that stay, for compiling all of them takes long."""

MOBILENET_V1_LAYERS = 3 + 4 * 6
"""The stem and four of the 13 blocks, which aren't named."""

OTHERS = {"layers", "lenet5", "mlp"}
"""Components whose files are small enough: `test_conf` trains those."""


IMPORTED = {"flax", "function", "keras", "onnx", "torch"}
"""Networks of the user's own, which tests of their own train."""

OF_ROWS = {"table"}
"""Networks that are built from the columns of a table: `tests/stages/test_table_runs.py`."""


@pytest.mark.medium
def test_model_components_are_all_tested() -> None:
    names = {conf_model(name).name for name in SMALL}
    assert names == set(list_components("model")) - OTHERS - IMPORTED - OF_ROWS


def small(name: str, dtype: str = "float32") -> tuple[nn.Module, Any, np.ndarray]:
    """The network, four samples for it and their labels."""
    changes, image = SMALL[name]
    spec, labels = conf_model(name, **changes), np.array([1, 0, 0, 1])
    vocabulary = {"bert_base": 20, "gpt2": 2, "wide_deep": 20}.get(name)
    if vocabulary:
        numbers = np.random.default_rng(0).integers(0, vocabulary, (4, *image)).astype(np.float32)
        if name == "wide_deep":
            pair = {"field_index": numbers[..., 0].astype(np.int32), "field_value": numbers[..., 1]}
            return spec.build(2, dtype), pair, labels
        return spec.build(2, dtype), numbers.astype(np.int32), labels
    images = random(4, *image)
    if name not in (*KEPT, "mobilenet_v1"):
        return spec.build(2, dtype), images, labels
    layers = spec.layers_for(2)
    if name == "mobilenet_v1":
        layers = [*layers[:MOBILENET_V1_LAYERS], *layers[-2:]]
    else:
        layers = [layer for layer in layers if layer.scope is None or layer.scope in KEPT[name]]
    return Network(tuple(layers), spec.init, dtype), images, labels


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_gradient_step_lowers_the_loss(name: str) -> None:
    module, samples, labels = small(name)
    init = partial(without_draws(module).init, train=False)
    variables = draw_variables(jax.eval_shape(init, jax.random.key(0), samples))

    def loss(params: object) -> jax.Array:
        logits, _ = module.apply(
            {**variables, "params": params},
            samples,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        wanted = jax.nn.one_hot(labels.reshape(4, *(1,) * (logits.ndim - 2)), 2)
        return -(jax.nn.log_softmax(logits) * wanted).sum(-1).mean()

    descend = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    before, gradients = descend(variables["params"])
    for path, gradient in parameters({"params": gradients}).items():
        assert np.isfinite(gradient).all(), path
    square = sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(gradients))
    rate = 0.01 * float(before) / square
    stepped = jax.tree.map(lambda leaf, slope: leaf - rate * slope, variables["params"], gradients)
    after, _ = descend(stepped)
    assert float(after) == pytest.approx(0.99 * float(before), rel=0.005)


@pytest.mark.slow
@pytest.mark.parametrize("name", SMALL)
def test_activations_keep_their_dtype_and_logits_are_float32(name: str) -> None:
    module, samples, _ = small(name, "bfloat16")

    def outputs() -> object:
        _, variables = without_draws(module).init_with_output(
            jax.random.key(0), samples, train=False, capture_intermediates=True
        )
        return variables["intermediates"]

    found = {
        path: leaf.dtype.name
        for path, (leaf,) in flatten_dict(jax.eval_shape(outputs), sep="/").items()
    }
    assert found.pop("__call__") == "float32"
    assert set(found.values()) == {"bfloat16"}
