"""EfficientNet (Tan and Le 2019)."""

from __future__ import annotations

from math import ceil
from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import (
    Depthwise,
    Stack,
    conv_norm,
    inverted_bottleneck,
    residual_if,
    round_features,
    squeeze_excite,
)
from pipeline.models.blocks.layered_model import StridedModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Dense, Dropout, GlobalAvgPool, Swish


class _Row(NamedTuple):
    """A stage of table 1; `stride` is for its first block."""

    expansion: int
    kernel: int
    stride: int
    features: int
    blocks: int


_ROWS = (
    _Row(1, 3, 1, 16, 1),
    _Row(6, 3, 2, 24, 2),
    _Row(6, 5, 2, 40, 2),
    _Row(6, 3, 2, 80, 3),
    _Row(6, 5, 1, 112, 3),
    _Row(6, 5, 2, 192, 4),
    _Row(6, 3, 1, 320, 1),
)

_EPSILON = 1e-3


@part("model")
class EfficientNet(StridedModelSpec):
    """Inverted residuals with squeeze and excitation, scaled in width and in depth.

    Blocks are not dropped at random. With 1000 classes B0 has 5,288,548 parameters.
    """

    name: Literal["efficientnet"] = "efficientnet"
    width: PositiveFloat
    """Factor on the features of B0 of every layer, in multiples of 8."""
    depth: Annotated[float, Field(gt=0, le=100)]
    """Factor on the number of blocks of B0 in each stage, rounded up."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = self._scale(32)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2, epsilon=_EPSILON), Swish()]
        for number, row in enumerate(_ROWS, start=1):
            features = self._scale(row.features)
            for index in range(ceil(row.blocks * self.depth)):
                stride = row.stride if index == 0 else 1
                keeps = stride == 1 and channels == features
                body = _block(channels, row, features, stride)
                layers.append(residual_if(keeps, f"stage{number}_block{index}", body))
                channels = features
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        last = conv_norm(self._scale(1280), 1, epsilon=_EPSILON)
        return (*layers, *last, Swish(), *head)

    def _scale(self, features: int) -> int:
        return round_features(features * self.width)


def _block(channels: int, row: _Row, features: int, stride: int) -> Stack:
    hidden = channels * row.expansion
    gate = (squeeze_excite(hidden, max(1, channels // 4), act=Swish()),)
    depthwise = Depthwise(hidden, row.kernel, stride)
    return inverted_bottleneck(channels, depthwise, features, Swish(), gate, epsilon=_EPSILON)
