"""MobileNet (Howard et al. 2017)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import Stack, conv_norm
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Dense, GlobalAvgPool, Relu

_ROWS = (
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
        channels = self._scaled(32)
        layers: Stack = (*conv_norm(channels, 3, 2), Relu())
        for features, stride in _ROWS:
            depthwise = conv_norm(channels, 3, stride, groups=channels)
            channels = self._scaled(features)
            layers += (*depthwise, Relu(), *conv_norm(channels, 1), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _scaled(self, features: int) -> int:
        return max(1, int(features * self.width))
