"""RegNetX (Radosavovic et al. 2020)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import bottleneck, conv_norm, projection
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.blocks.residual_stages import StageBlock, check_stages, stage_blocks
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Dense, GlobalAvgPool, Relu, Residual


@part("model")
class RegNetX(StridedModelSpec):
    """Stages of residual blocks with group convolutions and no bottleneck; each stage halves."""

    name: Literal["regnet_x"] = "regnet_x"
    stem: PositiveInt
    """Features of the first convolution."""
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    widths: Seq[PositiveInt]
    """Features of the blocks, stage by stage."""
    group_width: PositiveInt
    """Features of each group of a 3x3 convolution."""

    @model_validator(mode="after")
    def _stages_are_whole(self) -> Self:
        check_stages(blocks=self.blocks, widths=self.widths)
        for width in self.widths:
            if width % self.group_width:
                raise ValueError(
                    f"widths {list(self.widths)} must be multiples of group_width "
                    f"{self.group_width}; {width} is not"
                )
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*conv_norm(self.stem, 3, 2), Relu()]
        for at in stage_blocks(self.blocks, self.widths, self.stem):
            layers += (self._block(at), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _block(self, at: StageBlock) -> Residual:
        body = bottleneck(at.width, at.width, at.stride, at.width // self.group_width)
        shortcut = projection(at.channels, at.width, at.stride)
        return Residual(scope=at.scope, body=body, shortcut=shortcut)
