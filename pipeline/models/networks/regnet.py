"""RegNetX (Radosavovic et al. 2020)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.models.fields import Count
from pipeline.models.layers import Dense, GlobalAvgPool, Relu, Residual
from pipeline.models.spec import LayerSpec
from pipeline.models.stacks import conv_norm
from pipeline.models.strided import StridedModelSpec
from pipeline.registry import Seq, part


@part("model")
class RegNetX(StridedModelSpec):
    """Stages of residual blocks with group convolutions and no bottleneck; each stage halves."""

    name: Literal["regnet_x"] = "regnet_x"
    stem: PositiveInt
    """Features of the first convolution."""
    blocks: Seq[Count]
    """How many blocks each stage has."""
    widths: Seq[PositiveInt]
    """Features of the blocks, stage by stage."""
    group_width: PositiveInt
    """Features of each group of a 3x3 convolution."""

    @model_validator(mode="after")
    def _stages_are_whole(self) -> Self:
        if not self.blocks or len(self.blocks) != len(self.widths):
            raise ValueError(
                f"blocks {list(self.blocks)} and widths {list(self.widths)} must have one entry "
                "per stage each"
            )
        for width in self.widths:
            if width % self.group_width:
                raise ValueError(
                    f"widths {list(self.widths)} must be multiples of group_width "
                    f"{self.group_width}; {width} is not"
                )
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*conv_norm(self.stem, 3, 2), Relu()]
        channels = self.stem
        for stage, (count, width) in enumerate(zip(self.blocks, self.widths, strict=True), start=1):
            for index in range(count):
                scope, stride = f"stage{stage}_block{index}", 2 if index == 0 else 1
                layers += (self._block(scope, channels, width, stride), Relu())
                channels = width
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _block(self, scope: str, channels: int, width: int, stride: int) -> Residual:
        body = (
            *conv_norm(width, 1),
            Relu(),
            *conv_norm(width, 3, stride, groups=width // self.group_width),
            Relu(),
            *conv_norm(width, 1),
        )
        changes = stride != 1 or channels != width
        shortcut = conv_norm(width, 1, stride) if changes else ()
        return Residual(scope=scope, body=body, shortcut=shortcut)
