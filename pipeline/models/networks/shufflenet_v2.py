"""ShuffleNet V2 (Ma et al. 2018)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import HALVE, Stack, conv_norm
from pipeline.models.blocks.layered_model import StridedModelSpec, stage_blocks
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Branches, ChannelShuffle, Dense, GlobalAvgPool, Relu

Even = Annotated[PositiveInt, Field(multiple_of=2)]


@part("model")
class ShuffleNetV2(StridedModelSpec):
    """Units that work on half of the channels and shuffle the halves (fig. 3, c and d)."""

    stage_fields: ClassVar[tuple[str, ...]] = ("units", "widths")
    name: Literal["shufflenet_v2"] = "shufflenet_v2"
    stem: PositiveInt
    """Features of the first convolution."""
    units: Seq[Count]
    """Number of units of each stage; the first one halves the image."""
    widths: Seq[Even]
    """Features of the units, stage by stage."""
    last: PositiveInt
    """Features of the last convolution."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*conv_norm(self.stem, 3, 2), Relu(), HALVE]
        for at in stage_blocks(self.units, self.widths, self.stem):
            scope = f"stage{at.stage + 1}_unit{at.index}"
            unit = _unit(scope, at.channels, at.width, at.stride)
            layers += (unit, ChannelShuffle(groups=2))
        head = (GlobalAvgPool(), Dense(features=classes))
        return (*layers, *conv_norm(self.last, 1), Relu(), *head)


def _unit(scope: str, channels: int, width: int, stride: int) -> Branches:
    half = width // 2
    body = (*conv_norm(half, 1), Relu(), *_depthwise(half, half, stride))
    shortcut = _depthwise(channels, half, stride) if stride == 2 else ()
    return Branches(scope=scope, branches=(shortcut, body), split=stride != 2)


def _depthwise(channels: int, features: int, stride: int) -> Stack:
    depthwise = conv_norm(channels, 3, stride, groups=channels)
    return (*depthwise, *conv_norm(features, 1), Relu())
