"""ShuffleNet V2 (Ma et al. 2018)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.models.fields import Count
from pipeline.models.layers import (
    Branches,
    ChannelShuffle,
    Dense,
    GlobalAvgPool,
    MaxPool,
    Relu,
)
from pipeline.models.spec import LayerSpec
from pipeline.models.stacks import Stack, conv_norm
from pipeline.models.strided import StridedModelSpec
from pipeline.registry import Seq, part

Even = Annotated[PositiveInt, Field(multiple_of=2)]


@part("model")
class ShuffleNetV2(StridedModelSpec):
    """Units that work on half of the channels and shuffle the halves (fig. 3, c and d)."""

    name: Literal["shufflenet_v2"] = "shufflenet_v2"
    stem: PositiveInt
    """Features of the first convolution."""
    units: Seq[Count]
    """How many units each stage has; the first one halves the image."""
    widths: Seq[Even]
    """Features of the units, stage by stage."""
    last: PositiveInt
    """Features of the last convolution."""

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        if not self.units or len(self.units) != len(self.widths):
            raise ValueError(
                f"units {list(self.units)} and widths {list(self.widths)} must have one entry "
                "per stage each"
            )
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = self.stem
        halve = MaxPool(kernel=3, stride=2, padding="same")
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), Relu(), halve]
        for stage, (count, width) in enumerate(zip(self.units, self.widths, strict=True), start=2):
            for index in range(count):
                scope = f"stage{stage}_unit{index}"
                layers += (_unit(scope, channels, width, index == 0), ChannelShuffle(groups=2))
                channels = width
        head = (GlobalAvgPool(), Dense(features=classes))
        return (*layers, *conv_norm(self.last, 1), Relu(), *head)


def _unit(scope: str, channels: int, width: int, halves: bool) -> Branches:
    half, stride = width // 2, 2 if halves else 1
    body = (*conv_norm(half, 1), Relu(), *_depthwise(half, half, stride))
    other = _depthwise(channels, half, stride) if halves else ()
    return Branches(scope=scope, branches=(other, body), split=not halves)


def _depthwise(channels: int, features: int, stride: int) -> Stack:
    depthwise = conv_norm(channels, 3, stride, groups=channels)
    return (*depthwise, *conv_norm(features, 1), Relu())
