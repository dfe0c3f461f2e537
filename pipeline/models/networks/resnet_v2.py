"""Residual networks of full pre-activation (He et al. 2016, "Identity mappings"), and the wide
ones for CIFAR (Zagoruyko and Komodakis 2016)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import EXPANSION, HALVE, Stack
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.blocks.residual_stages import StageBlock, check_stages, stage_blocks
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    BatchNorm,
    Conv,
    Dense,
    Dropout,
    GlobalAvgPool,
    Relu,
    Residual,
    Sequence,
)


@part("model")
class ResNetV2(StridedModelSpec):
    """Stages of residual blocks in which batch norm and ReLU come before each convolution.

    Where a block changes the shape, its shortcut is a 1x1 convolution of the activated input, and
    stands with the residual after the first batch norm and ReLU.
    """

    name: Literal["resnet_v2"] = "resnet_v2"
    block: Literal["basic", "bottleneck"]
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    widths: Seq[PositiveInt]
    """Features of the 3x3 convolutions, stage by stage; a bottleneck gives four times as many."""
    stem: Literal["imagenet", "cifar"]
    """imagenet: 7x7/2 convolution and 3x3/2 max pool; cifar: 3x3 convolution."""
    stem_width: PositiveInt
    """Features of the first convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Rate of the dropout before the 3x3 convolution, or before the second one of a basic block."""

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        check_stages(blocks=self.blocks, widths=self.widths)
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        expansion = EXPANSION[self.block]
        places = stage_blocks(
            self.blocks, self.widths, self.stem_width, expansion=expansion, halve_first=False
        )
        end = (BatchNorm(), Relu(), GlobalAvgPool(), Dense(features=classes))
        return (*self._stem(), *map(self._block, places), *end)

    def _stem(self) -> Stack:
        if self.stem == "cifar":
            return (Conv(features=self.stem_width, kernel=3),)
        conv = Conv(features=self.stem_width, kernel=7, stride=2)
        return conv, HALVE

    def _block(self, at: StageBlock) -> LayerSpec:
        features = at.width * EXPANSION[self.block]
        activate = (BatchNorm(), Relu())
        body = self._convs(at.width, features, at.stride)
        if at.stride == 1 and at.channels == features:
            return Residual(scope=at.scope, body=(*activate, *body))
        shortcut = (Conv(features=features, kernel=1, stride=at.stride),)
        return Sequence(scope=at.scope, body=(*activate, Residual(body=body, shortcut=shortcut)))

    def _convs(self, width: int, features: int, stride: int) -> Stack:
        activate = (BatchNorm(), Relu())
        between = (*activate, Dropout(rate=self.dropout)) if self.dropout else activate
        if self.block == "basic":
            first = Conv(features=width, kernel=3, stride=stride)
            return first, *between, Conv(features=features, kernel=3)
        middle = Conv(features=width, kernel=3, stride=stride)
        last = Conv(features=features, kernel=1)
        return Conv(features=width, kernel=1), *between, middle, *activate, last
