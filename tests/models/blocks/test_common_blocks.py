from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.blocks.common_blocks import (
    Depthwise,
    conv_norm,
    inverted_bottleneck,
    make_shortcut,
    residual_if,
    round_features,
    squeeze_excite,
)
from pipeline.models.layers.standard import (
    Conv,
    Dense,
    HardSigmoid,
    Relu,
    Residual,
    Sequence,
    Sigmoid,
    Swish,
)


@pytest.mark.parametrize(
    ("width", "expected"), [(1, 8), (12, 16), (8.8, 8), (24 * 0.75, 24), (32 * 0.35, 16), (64, 64)]
)
def test_widths_are_rounded_as_in_mobilenet(width: float, expected: int) -> None:
    assert round_features(width) == expected


@given(st.floats(1, 1e5))
def test_rounded_widths_are_multiples_near_the_width(width: float) -> None:
    result = round_features(width)
    assert result % 8 == 0
    assert 0.9 * width <= result
    assert abs(result - width) <= max(8, 4 + 0.1 * width)


def test_conv_norm_has_no_convolution_bias() -> None:
    conv, norm = conv_norm(8, 3, 2, groups=4, epsilon=1e-3)
    assert (conv.features, conv.stride, conv.groups, conv.bias) == (8, 2, 4, False)
    assert norm.epsilon == 1e-3


def test_squeeze_excite_reduces_and_expands_features() -> None:
    pool, first, act, second, gate = squeeze_excite(16, 4).body
    assert pool.name == "global_avg_pool"
    assert (first, act, second, gate) == (Dense(features=4), Relu(), Dense(features=16), Sigmoid())
    body = squeeze_excite(16, 4, act=Swish(), last_act=HardSigmoid()).body
    assert (body[2], body[4]) == (Swish(), HardSigmoid())


def test_residual_if_is_a_residual_only_on_condition() -> None:
    body = (Relu(),)
    assert residual_if(True, "block", body) == Residual(scope="block", body=body)
    assert residual_if(False, "block", body) == Sequence(scope="block", body=body)


def test_inverted_bottleneck_expands_only_to_more_features() -> None:
    names = [
        layer.name
        for layer in inverted_bottleneck(8, Depthwise(32, 5, 2), 16, Relu(), epsilon=1e-3)
    ]
    assert names == ["conv", "batch_norm", "relu"] * 2 + ["conv", "batch_norm"]
    depthwise = inverted_bottleneck(8, Depthwise(8, 5, 2), 16, Relu())[0]
    assert isinstance(depthwise, Conv)
    assert (depthwise.kernel, depthwise.stride, depthwise.groups) == (5, 2, 8)


def test_shortcut_is_empty_if_the_shape_is_unchanged() -> None:
    assert make_shortcut(8, 8, 1) == ()
    assert [layer.name for layer in make_shortcut(8, 8, 2)] == ["conv", "batch_norm"]
    assert make_shortcut(8, 16, 1)[0] == Conv(features=16, kernel=1)
