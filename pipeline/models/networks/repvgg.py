"""RepVGG as it is trained (Ding et al. 2021)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import conv_norm
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.blocks.residual_stages import check_stages, stage_blocks
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import BatchNorm, Dense, GlobalAvgPool, Relu, Residual


@part("model")
class RepVGG(StridedModelSpec):
    """Blocks that add a 3x3, a 1x1 and, where the shape stays, the input, each normalised."""

    name: Literal["repvgg"] = "repvgg"
    stem: PositiveInt
    """Features of the first block."""
    blocks: Seq[Count]
    """Number of blocks of each stage; the first one halves the image."""
    widths: Seq[PositiveInt]
    """Features of the blocks, stage by stage."""

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        check_stages(blocks=self.blocks, widths=self.widths)
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [_block("stem", self.stem, 2, same=False), Relu()]
        for at in stage_blocks(self.blocks, self.widths, self.stem):
            same = at.stride == 1 and at.channels == at.width
            layers += (_block(at.scope, at.width, at.stride, same), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))


def _block(scope: str, features: int, stride: int, same: bool) -> Residual:
    three, one = conv_norm(features, 3, stride), conv_norm(features, 1, stride)
    if not same:
        return Residual(scope=scope, body=three, shortcut=one)
    convs = Residual(scope="convs", body=three, shortcut=one)
    return Residual(scope=scope, body=(convs,), shortcut=(BatchNorm(),))
