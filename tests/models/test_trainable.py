"""A small version of every network in Python learns: a step along the gradient lowers the loss."""

from __future__ import annotations

from typing import Any

import jax
import numpy as np
import pytest

from pipeline.registry import parts
from tests.models.build import QUICK, Variables, conf_model, parameters, random, shapes

RESNET = {"blocks": [1, 1], "widths": [4, 8]}
SQUEEZENET = {"stem_features": 8, "squeezes": [2, 2, 4], "pool_after": [2]}
VGG = {"convs": [1, 1], "widths": [4, 6], "hidden": 8}

SMALL: dict[str, tuple[dict[str, Any], tuple[int, int, int]]] = {
    "alexnet": ({"hidden": 8}, (63, 63, 3)),
    "googlenet": ({"width": 0.06}, (64, 64, 3)),
    "mobilenet_v1": ({"width": 0.1}, (48, 48, 3)),
    "mobilenet_v2": ({"width": 0.1}, (48, 48, 3)),
    "mobilenet_v3_small": ({"width": 0.1}, (48, 48, 3)),
    "resnet50": (RESNET, (32, 32, 3)),
    "resnext50_32x4d": ({**RESNET, "groups": 2, "group_width": 32}, (32, 32, 3)),
    "se_resnet18": ({**RESNET, "squeeze": 2}, (32, 32, 3)),
    "squeezenet_residual": (SQUEEZENET, (48, 48, 3)),
    "vgg16": (VGG, (16, 16, 3)),
    "vgg16_bn": (VGG, (16, 16, 3)),
}
"""By the file that it is a version of: what is smaller, and the images."""

CLASSES = 5
OTHERS = {"layers", "lenet5", "mlp"}
"""Parts whose files are small enough: `test_conf` trains those."""


def drawn(variables: Variables) -> Variables:
    """Variables of these shapes, drawn without compiling: kernels He normal, scales and variances
    one, all else zero."""
    generator = np.random.default_rng(0)

    def draw(path: tuple[jax.tree_util.DictKey, ...], leaf: jax.ShapeDtypeStruct) -> np.ndarray:
        if len(leaf.shape) > 1:
            deviation = (2 / np.prod(leaf.shape[:-1])) ** 0.5
            return generator.normal(0, deviation, leaf.shape).astype(np.float32)
        return np.full(leaf.shape, path[-1].key in ("scale", "var"), np.float32)

    return jax.tree_util.tree_map_with_path(draw, variables)


def test_every_part_is_tested() -> None:
    names = {conf_model(name).name for name in SMALL}
    assert names == set(parts("model")) - OTHERS


@pytest.mark.parametrize("name", SMALL)
def test_a_step_along_the_gradient_lowers_the_loss(name: str) -> None:
    changes, image = SMALL[name]
    module = conf_model(name, **changes).build(CLASSES, "float32")
    images, labels = random(4, *image), np.array([1, 3, 0, 2])
    variables = drawn(shapes(module, image))

    def loss(params: object) -> jax.Array:
        logits, _ = module.apply(
            {**variables, "params": params},
            images,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(1)},
        )
        return -jax.nn.log_softmax(logits)[np.arange(4), labels].mean()

    descend = jax.jit(jax.value_and_grad(loss), compiler_options=QUICK)
    before, gradients = descend(variables["params"])
    for path, gradient in parameters({"params": gradients}).items():
        assert np.isfinite(gradient).all(), path
    square = sum(float(np.square(leaf).sum()) for leaf in jax.tree.leaves(gradients))
    rate = 0.01 * float(before) / square
    stepped = jax.tree.map(lambda leaf, slope: leaf - rate * slope, variables["params"], gradients)
    after, _ = descend(stepped)
    assert float(after) == pytest.approx(0.99 * float(before), rel=0.005)
