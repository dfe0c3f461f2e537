"""MobileNetV3 (Howard et al. 2019)."""

from __future__ import annotations

from typing import Annotated, Literal, NamedTuple

from pydantic import Field, PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import (
    Stack,
    conv_norm,
    inverted,
    residual_if,
    rounded,
    squeeze_excite,
)
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    Dense,
    Dropout,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    Relu,
)


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
        channels = self._scaled(16)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), HardSwish()]
        for index, row in enumerate(rows):
            keeps = row.stride == 1 and channels == self._scaled(row.features)
            layers.append(residual_if(keeps, f"block{index}", self._inverted(channels, row)))
            channels = self._scaled(row.features)
        return (
            *layers,
            *conv_norm(6 * channels, 1),
            HardSwish(),
            GlobalAvgPool(),
            Dense(features=self._scaled(hidden)),
            HardSwish(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _inverted(self, channels: int, row: _Row) -> Stack:
        hidden, act = self._scaled(row.hidden), HardSwish() if row.hard else Relu()
        squeeze = (squeeze_excite(hidden, rounded(hidden / 4), gate=HardSigmoid()),)
        gate = squeeze if row.squeeze else ()
        features = self._scaled(row.features)
        return inverted(channels, hidden, features, row.kernel, row.stride, act, gate)

    def _scaled(self, features: int) -> int:
        return rounded(features * self.width)
