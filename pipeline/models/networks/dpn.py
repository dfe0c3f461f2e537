"""Dual path networks (Chen et al. 2017)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import Stack, imagenet_stem
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.blocks.residual_stages import check_stages
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import BatchNorm, Conv, Dense, DualPath, GlobalAvgPool, Relu


@part("model")
class DualPathNetwork(StridedModelSpec):
    """Blocks that add to one part of the channels, as a ResNet, and append to the rest, as a
    DenseNet (table 1)."""

    name: Literal["dpn"] = "dpn"
    stem: PositiveInt
    """Features of the first convolution."""
    width: PositiveInt
    """Features that the first stage adds to; each later stage has twice as many."""
    inner: PositiveInt
    """Features of the 3x3 convolutions of the first stage; doubled likewise."""
    groups: PositiveInt
    """Groups of the 3x3 convolutions."""
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    growths: Seq[PositiveInt]
    """Features that a block appends, stage by stage; the first one of a stage appends thrice."""

    @model_validator(mode="after")
    def _one_growth_per_stage(self) -> Self:
        check_stages(blocks=self.blocks, growths=self.growths)
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*imagenet_stem(self.stem, epsilon=1e-3)]
        for stage, count in enumerate(self.blocks):
            layers += [self._block(stage, index) for index in range(count)]
        end = (BatchNorm(epsilon=1e-3), Relu(), GlobalAvgPool(), Dense(features=classes))
        return (*layers, *end)

    def _block(self, stage: int, index: int) -> DualPath:
        width, inner, growth = self.width << stage, self.inner << stage, self.growths[stage]
        stride = 2 if stage > 0 and index == 0 else 1
        shortcut = _conv(width + 2 * growth, 1, stride) if index == 0 else ()
        return DualPath(
            scope=f"stage{stage + 1}_block{index}",
            body=(
                *_conv(inner, 1),
                *_conv(inner, 3, stride, self.groups),
                *_conv(width + growth, 1),
            ),
            added=width,
            shortcut=shortcut,
        )


def _conv(features: int, kernel: int, stride: int = 1, groups: int = 1) -> Stack:
    conv = Conv(features=features, kernel=kernel, stride=stride, groups=groups)
    return BatchNorm(epsilon=1e-3), Relu(), conv
