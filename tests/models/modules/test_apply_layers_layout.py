from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    AvgPool,
    BatchNorm,
    ChannelShuffle,
    Conv,
    Dense,
    Dropout,
    Flatten,
    GlobalAvgPool,
    MaxPool,
    Relu,
    Tanh,
)
from pipeline.models.lowerings.problem import Layout, Problem, RecordingPolicy
from pipeline.models.lowerings.tune import rule
from pipeline.models.lowerings.tune.rule import choose_layout_by_rule
from pipeline.models.modules.network import Network
from tests.models.build import conf_model, initialise, network, random, shapes

EVERY_LAYER = (
    Conv(features=6, kernel=3, bias=True),
    BatchNorm(),
    Relu(),
    MaxPool(kernel=2),
    Dropout(rate=0.5),
    Conv(features=5, kernel=3, stride=2, padding=((0, 2), (1, 0)), dilation=2),
    Tanh(),
    Conv(features=4, kernel=3, stride=2, padding="symmetric"),
    AvgPool(kernel=2, stride=1, padding="same"),
    Flatten(),
    Dense(features=7),
    BatchNorm(),
    Dropout(rate=0.5),
    Dense(features=3),
)
POOLED = (Conv(features=6, kernel=3), GlobalAvgPool(), Dense(features=3))
IMAGES = random(4, 12, 11, 2)


def training(module: Network, layout: Layout) -> tuple[Any, Any]:
    """Logits with what they changed, and gradients, of a step of training from the same weights."""
    variables = initialise(module, IMAGES)
    turned = module.clone(layout=layout)

    def loss(params: Any) -> tuple[jax.Array, Any]:
        logits, changed = turned.apply(
            {**variables, "params": params},
            IMAGES,
            train=True,
            mutable=["batch_stats"],
            rngs={"dropout": jax.random.key(3)},
        )
        return (logits * jnp.cos(jnp.arange(logits.size)).reshape(logits.shape)).sum(), (
            logits,
            changed,
        )

    gradients, made = jax.jit(jax.grad(loss, has_aux=True))(variables["params"])
    return made, gradients


@pytest.mark.slow
@pytest.mark.parametrize("stack", [EVERY_LAYER, POOLED], ids=["every layer", "pooled"])
def test_both_layouts_compute_the_same_from_the_same_parameters(
    stack: tuple[LayerSpec, ...],
) -> None:
    first, last = (
        jax.tree.leaves(training(network(*stack), layout)) for layout in ("nhwc", "chwn")
    )
    assert len(first) == len(last) > 2
    for one, other in zip(first, last, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-5 * max(1, np.abs(one).max()))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["lenet5", "vgg16_bn"])
def test_networks_have_the_same_parameters_in_both_layouts(name: str) -> None:
    module = conf_model(name).build(10, "float32")
    assert isinstance(module, Network)
    first, last = (shapes(module.clone(layout=layout), (32, 32, 3)) for layout in ("nhwc", "chwn"))
    assert first == last


@pytest.mark.parametrize(
    ("layer", "name"),
    [(ChannelShuffle(groups=2), "channel_shuffle"), (Conv(features=4, kernel=1, groups=2), "conv")],
)
def test_layer_without_chwn_support_is_reported(layer: LayerSpec, name: str) -> None:
    module = network(layer, Flatten(), Dense(features=3)).clone(layout="chwn")
    with pytest.raises(ValueError, match=f"layer {name} can't be computed in the layout chwn"):
        initialise(module, IMAGES)


def test_non_image_input_is_refused_in_chwn() -> None:
    module = network(Dense(features=3)).clone(layout="chwn")
    with pytest.raises(ValueError, match=r"has shape \(6, 4\); must be nhwc"):
        initialise(module, random(6, 4))


def test_errors_have_image_shapes() -> None:
    module = network(MaxPool(kernel=20, padding="valid"), Flatten()).clone(layout="chwn")
    with pytest.raises(ValueError, match=r"20x20 does not fit into shape \(4, 12, 11, 2\)"):
        initialise(module, IMAGES)


def problems(
    stack: tuple[LayerSpec, ...], image: tuple[int, ...], dtype: str = "float32"
) -> list[Problem]:
    """The convolutions of a training step."""
    listing = RecordingPolicy()
    module = network(*stack, dtype=dtype).clone(policy=listing)
    images = jax.ShapeDtypeStruct(image, jnp.float32)
    jax.eval_shape(lambda x: module.init(jax.random.key(0), x, train=False), images)
    return list(listing.problems)


LENET = conf_model("lenet5").layers_for(10)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_chwn_is_chosen_for_few_channels_on_cpu(dtype: str) -> None:
    assert choose_layout_by_rule(problems(LENET, (32, 32, 32, 1), dtype), "cpu") == "chwn"


@pytest.mark.parametrize("has_onednn", [True, False])
def test_nhwc_is_chosen_for_large_convolutions_where_onednn_is(
    monkeypatch: pytest.MonkeyPatch, has_onednn: bool
) -> None:
    monkeypatch.setattr(rule, "may_have_onednn", lambda platform: has_onednn)
    image = (32, 32, 32, 3)
    # 85 and 42 million operations of the convolution.
    large, small = (
        problems((Conv(features=features, kernel=3), Flatten(), Dense(features=10)), image)
        for features in (48, 24)
    )
    assert choose_layout_by_rule(large, "cpu") == ("nhwc" if has_onednn else "chwn")
    assert choose_layout_by_rule(small, "cpu") == "chwn"


def test_nhwc_is_chosen_for_other_networks_and_devices() -> None:
    small = (32, 32, 32, 1)
    dense = (Flatten(), Dense(features=10))
    shuffled = (ChannelShuffle(groups=1), *LENET)
    assert choose_layout_by_rule(problems(LENET, small), "gpu") == "nhwc"
    assert choose_layout_by_rule(problems(LENET, (1024, 32, 32, 1)), "cpu") == "nhwc"
    assert choose_layout_by_rule(problems(LENET, small, "float16"), "cpu") == "nhwc"
    assert choose_layout_by_rule(problems(dense, small), "cpu") == "nhwc"
    assert network(*LENET).can_be_batch_last(small[1:])
    assert not network(*shuffled).can_be_batch_last(small[1:])
