"""MobileNetV2 (Sandler et al. 2018)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import conv_norm, inverted, residual_if, rounded
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Dense, Dropout, GlobalAvgPool, Relu6

_ROWS = (
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
        channels = rounded(32 * self.width)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), Relu6()]
        for row, (expansion, width, blocks, first) in enumerate(_ROWS):
            features = rounded(width * self.width)
            for index in range(blocks):
                stride = first if index == 0 else 1
                body = inverted(channels, expansion * channels, features, 3, stride, Relu6())
                keeps = stride == 1 and channels == features
                layers.append(residual_if(keeps, f"stage{row}_block{index}", body))
                channels = features
        last = rounded(1280 * max(1.0, self.width))
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        return (*layers, *conv_norm(last, 1), Relu6(), *head)
