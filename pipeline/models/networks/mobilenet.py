"""MobileNet (Howard et al. 2017), MobileNetV2 (Sandler et al. 2018), V3 (Howard et al. 2019)."""

from __future__ import annotations

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
from pipeline.models.layers.standard import (
    Dense,
    Dropout,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Relu,
    Relu6,
)

_ROWS_V1 = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
"""Features of the 1x1 convolutions and strides of the depthwise ones before them (table 1)."""


@part("model")
class MobileNetV1(StridedModelSpec):
    """A depthwise 3x3 and a 1x1 convolution, 13 times over.

    With 1000 classes and width 1 it has 4,231,976 parameters.
    """

    name: Literal["mobilenet_v1"] = "mobilenet_v1"
    width: PositiveFloat
    """Factor on the paper's features of every convolution, rounded down."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = self._scale(32)
        layers: Stack = (*conv_norm(channels, 3, 2), Relu())
        for features, stride in _ROWS_V1:
            depthwise = conv_norm(channels, 3, stride, groups=channels)
            channels = self._scale(features)
            layers += (*depthwise, Relu(), *conv_norm(channels, 1), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _scale(self, features: int) -> int:
        return max(1, int(features * self.width))


_ROWS_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, features, blocks and stride of the first block (table 2)."""


@part("model")
class MobileNetV2(StridedModelSpec):
    """Inverted residuals: expand by a 1x1, filter by a depthwise 3x3, project by a linear 1x1.

    With 1000 classes and width 1 it has 3,504,872 parameters.
    """

    name: Literal["mobilenet_v2"] = "mobilenet_v2"
    width: PositiveFloat
    """Factor on the paper's features of every block, in multiples of 8."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = round_features(32 * self.width)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), Relu6()]
        for row, (expansion, width, blocks, first) in enumerate(_ROWS_V2):
            features = round_features(width * self.width)
            for index in range(blocks):
                stride = first if index == 0 else 1
                depthwise = Depthwise(expansion * channels, 3, stride)
                body = inverted_bottleneck(channels, depthwise, features, Relu6())
                keeps = stride == 1 and channels == features
                layers.append(residual_if(keeps, f"stage{row}_block{index}", body))
                channels = features
        last = round_features(1280 * max(1.0, self.width))
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        return (*layers, *conv_norm(last, 1), Relu6(), *head)


class _Row(NamedTuple):
    """A block, as tables 1 and 2 have it."""

    kernel: int
    hidden: int
    features: int
    squeeze: bool
    hard: bool
    stride: int


_LARGE = (
    _Row(3, 16, 16, False, False, 1),
    _Row(3, 64, 24, False, False, 2),
    _Row(3, 72, 24, False, False, 1),
    _Row(5, 72, 40, True, False, 2),
    _Row(5, 120, 40, True, False, 1),
    _Row(5, 120, 40, True, False, 1),
    _Row(3, 240, 80, False, True, 2),
    _Row(3, 200, 80, False, True, 1),
    _Row(3, 184, 80, False, True, 1),
    _Row(3, 184, 80, False, True, 1),
    _Row(3, 480, 112, True, True, 1),
    _Row(3, 672, 112, True, True, 1),
    _Row(5, 672, 160, True, True, 2),
    _Row(5, 960, 160, True, True, 1),
    _Row(5, 960, 160, True, True, 1),
)
_SMALL = (
    _Row(3, 16, 16, True, False, 2),
    _Row(3, 72, 24, False, False, 2),
    _Row(3, 88, 24, False, False, 1),
    _Row(5, 96, 40, True, True, 2),
    _Row(5, 240, 40, True, True, 1),
    _Row(5, 240, 40, True, True, 1),
    _Row(5, 120, 48, True, True, 1),
    _Row(5, 144, 48, True, True, 1),
    _Row(5, 288, 96, True, True, 2),
    _Row(5, 576, 96, True, True, 1),
    _Row(5, 576, 96, True, True, 1),
)
_SIZES = {"large": (_LARGE, 1280), "small": (_SMALL, 1024)}
"""The blocks, and the features of the hidden dense layer."""


@part("model")
class MobileNetV3(StridedModelSpec):
    """Inverted residuals with squeeze and excitation and hard swish.

    With 1000 classes and width 1, large has 5,483,032 parameters and small 2,542,856.
    """

    name: Literal["mobilenet_v3"] = "mobilenet_v3"
    size: Literal["large", "small"]
    width: PositiveFloat
    """Factor on the paper's features of every layer, in multiples of 8."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        rows, hidden = _SIZES[self.size]
        channels = self._scale(16)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), HardSwish()]
        for index, row in enumerate(rows):
            keeps = row.stride == 1 and channels == self._scale(row.features)
            layers.append(residual_if(keeps, f"block{index}", self._block(channels, row)))
            channels = self._scale(row.features)
        return (
            *layers,
            *conv_norm(6 * channels, 1),
            HardSwish(),
            GlobalAvgPool(),
            Dense(features=self._scale(hidden)),
            HardSwish(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _block(self, channels: int, row: _Row) -> Stack:
        hidden = self._scale(row.hidden)
        depthwise = Depthwise(hidden, row.kernel, row.stride)
        squeeze = (squeeze_excite(hidden, round_features(hidden / 4), gate=HardSigmoid()),)
        gate = squeeze if row.squeeze else ()
        act = HardSwish() if row.hard else Relu()
        return inverted_bottleneck(channels, depthwise, self._scale(row.features), act, gate)

    def _scale(self, features: int) -> int:
        return round_features(features * self.width)
