"""Xception (Chollet 2017, fig. 5)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import HALVE, Stack, conv_norm
from pipeline.models.blocks.layered_model import StridedModelSpec
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import BatchNorm, Conv, Dense, GlobalAvgPool, Relu, Residual

_FEATURES = (32, 64, 128, 256, 728, 1024, 1536, 2048)


@part("model")
class Xception(StridedModelSpec):
    """Residual blocks of depthwise separable convolutions, for images of 299x299.

    With 1000 classes it has 22,855,952 parameters.
    """

    name: Literal["xception"] = "xception"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    middle: Count
    """Number of blocks that keep the size; the paper has 8."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        w = [max(1, round(features * self.width)) for features in _FEATURES]
        middle = _after_relu(w[4], w[4]) * 3
        return (
            *conv_norm(w[0], 3, 2, padding="valid"),
            Relu(),
            *conv_norm(w[1], 3, padding="valid"),
            Relu(),
            _halving("entry0", _separable(w[1], w[2]), w[2], w[2]),
            _halving("entry1", _after_relu(w[2], w[3]), w[3], w[3]),
            _halving("entry2", _after_relu(w[3], w[4]), w[4], w[4]),
            *(Residual(scope=f"middle{i}", body=middle) for i in range(self.middle)),
            _halving("exit", _after_relu(w[4], w[4]), w[4], w[5]),
            *_separable(w[5], w[6]),
            Relu(),
            *_separable(w[6], w[7]),
            Relu(),
            GlobalAvgPool(),
            Dense(features=classes),
        )


def _separable(channels: int, features: int) -> Stack:
    """A 3x3 of every single channel, then a 1x1 of all, and batch norm."""
    depthwise = Conv(features=channels, kernel=3, groups=channels)
    return depthwise, Conv(features=features, kernel=1), BatchNorm()


def _after_relu(channels: int, features: int) -> Stack:
    return (Relu(), *_separable(channels, features))


def _halving(scope: str, first: Stack, channels: int, features: int) -> Residual:
    """Layers `first` to `channels`, a separable convolution to `features`, and a pool."""
    body = (*first, *_after_relu(channels, features), HALVE)
    return Residual(scope=scope, body=body, shortcut=conv_norm(features, 1, 2))
