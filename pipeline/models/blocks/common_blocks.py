"""Lists of layers that many networks share."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from pipeline.models.layers.model_spec import LayerSpec, Padding, Size
from pipeline.models.layers.standard import (
    BatchNorm,
    Conv,
    Dense,
    Gate,
    GlobalAvgPool,
    MaxPool,
    Relu,
    Residual,
    Sequence,
    Sigmoid,
)

Stack = tuple[LayerSpec, ...]

HALVE = MaxPool(kernel=3, stride=2, padding="same")
"""Halves height and width."""

EXPANSION = {"basic": 1, "bottleneck": 4}
"""Features of a residual block's output, as a multiple of its width (He et al. 2016)."""


def conv_norm(
    features: int,
    kernel: Size,
    stride: Size = 1,
    *,
    groups: int = 1,
    padding: Padding = "same",
    epsilon: float = 1e-5,
) -> Stack:
    """Return a convolution without bias, and batch norm."""
    conv = Conv(features=features, kernel=kernel, stride=stride, padding=padding, groups=groups)
    return conv, BatchNorm(epsilon=epsilon)


def imagenet_stem(features: int, *, epsilon: float = 1e-5) -> Stack:
    """Return a 7x7 convolution, batch norm, ReLU and max pool, which quarter height and width."""
    return (*conv_norm(features, 7, 2, epsilon=epsilon), Relu(), HALVE)


def bottleneck(inner: int, features: int, stride: int, groups: int) -> Stack:
    """Return three convolutions: 1x1 to `inner`, 3x3 with stride and groups, 1x1 to `features`."""
    return (
        *conv_norm(inner, 1),
        Relu(),
        *conv_norm(inner, 3, stride, groups=groups),
        Relu(),
        *conv_norm(features, 1),
    )


def make_shortcut(channels: int, features: int, stride: int) -> Stack:
    """Return the shortcut of a block: a 1x1 convolution if the shape changes, else the identity."""
    changes = stride != 1 or channels != features
    return conv_norm(features, 1, stride) if changes else ()


@dataclass(frozen=True)
class Depthwise:
    """A depthwise convolution: `hidden` features in and out."""

    hidden: int
    kernel: int
    stride: int


def inverted_bottleneck(
    channels: int,
    depthwise: Depthwise,
    features: int,
    act: LayerSpec,
    gate: Stack = (),
    *,
    epsilon: float = 1e-5,
) -> Stack:
    """Return the body of an inverted residual (Sandler et al. 2018, fig. 3). Its convolutions are:
    a 1x1 from `channels` to `depthwise.hidden`, left out if these are equal; the depthwise one; a
    1x1 to `features`. `act` follows the first and the second, and `gate` comes before the third."""
    hidden = depthwise.hidden
    expand = (*conv_norm(hidden, 1, epsilon=epsilon), act) if hidden != channels else ()
    middle = conv_norm(hidden, depthwise.kernel, depthwise.stride, groups=hidden, epsilon=epsilon)
    return (*expand, *middle, act, *gate, *conv_norm(features, 1, epsilon=epsilon))


def squeeze_excite(
    channels: int, hidden: int, act: LayerSpec | None = None, last_act: LayerSpec | None = None
) -> Gate:
    """Return a gate of channels: two dense layers on the means of all channels (Hu et al. 2018).
    `act`, by default ReLU, follows the first dense layer, `last_act`, by default sigmoid, the
    last."""
    reduce = (GlobalAvgPool(), Dense(features=hidden), act or Relu())
    expand = (Dense(features=channels), last_act or Sigmoid())
    return Gate(scope="squeeze_excite", body=(*reduce, *expand))


def residual_if(keeps_shape: bool, scope: str, body: Stack) -> LayerSpec:
    """Return body(x) + x as a residual block if `keeps_shape`, else the body in a scope."""
    return Residual(scope=scope, body=body) if keeps_shape else Sequence(scope=scope, body=body)


def map_layers(change: Callable[[LayerSpec], LayerSpec], stack: Stack) -> Stack:
    """Apply `change` to all layers and inner layers, the innermost first."""

    def change_value(value: Any) -> Any:
        if isinstance(value, tuple):
            return tuple(change_value(item) for item in value)
        if not isinstance(value, LayerSpec):
            return value
        fields = {field: change_value(inner) for field, inner in value}
        return change(value.model_copy(update=fields))

    return tuple(change_value(layer) for layer in stack)


def round_features(width: float) -> int:
    """Return the multiple of 8 nearest to `width`, but at least 90 % of `width`. The rule is from
    the reference implementation of the MobileNets (tensorflow/models, slim)."""
    nearest = max(8, int(width + 4) // 8 * 8)
    return nearest if nearest >= 0.9 * width else nearest + 8
