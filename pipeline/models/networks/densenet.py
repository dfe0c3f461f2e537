"""Densely connected networks (Huang et al. 2017), and dual path networks (Chen et al. 2017)."""

from __future__ import annotations

from functools import partial
from typing import ClassVar, Literal

from pydantic import PositiveInt

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import Stack, imagenet_stem
from pipeline.models.blocks.layered_model import StridedModelSpec
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    AvgPool,
    BatchNorm,
    Branches,
    Conv,
    Dense,
    DualPath,
    GlobalAvgPool,
    Relu,
)


@part("model")
class DenseNet(StridedModelSpec):
    """Dense blocks, in which every layer reads all features before it: DenseNet-BC (sec. 3).

    Between two blocks a 1x1 convolution halves the features and an average pool the image.
    """

    name: Literal["densenet"] = "densenet"
    growth: PositiveInt
    """Features that each layer adds; the stem has twice the number."""
    blocks: Seq[Count]
    """Number of layers of each dense block."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = 2 * self.growth
        layers: list[LayerSpec] = [*imagenet_stem(channels)]
        for number, count in enumerate(self.blocks, start=1):
            if number > 1:
                channels //= 2
                layers += (*_norm_relu_conv(channels, 1), AvgPool(kernel=2))
            layers += [self._layer(f"block{number}_layer{index}") for index in range(count)]
            channels += count * self.growth
        return (*layers, BatchNorm(), Relu(), GlobalAvgPool(), Dense(features=classes))

    def _layer(self, scope: str) -> Branches:
        body = (*_norm_relu_conv(4 * self.growth, 1), *_norm_relu_conv(self.growth, 3))
        return Branches(scope=scope, branches=((), body))


def _norm_relu_conv(
    features: int, kernel: int, stride: int = 1, groups: int = 1, *, epsilon: float = 1e-5
) -> Stack:
    conv = Conv(features=features, kernel=kernel, stride=stride, groups=groups)
    return BatchNorm(epsilon=epsilon), Relu(), conv


@part("model")
class DualPathNetwork(StridedModelSpec):
    """Blocks that add to one part of the channels, as a ResNet, and append to the rest, as a
    DenseNet (table 1)."""

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "growths")
    name: Literal["dpn"] = "dpn"
    stem: PositiveInt
    """Features of the first convolution."""
    width: PositiveInt
    """Features that the first stage adds to; each later stage has twice the number."""
    inner: PositiveInt
    """Features of the 3x3 convolutions of the first stage; doubled likewise."""
    groups: PositiveInt
    """Groups of the 3x3 convolutions."""
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    growths: Seq[PositiveInt]
    """Features that a block appends, stage by stage; the first one of a stage appends thrice."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*imagenet_stem(self.stem, epsilon=1e-3)]
        for stage, count in enumerate(self.blocks):
            layers += [self._block(stage, index) for index in range(count)]
        end = (BatchNorm(epsilon=1e-3), Relu(), GlobalAvgPool(), Dense(features=classes))
        return (*layers, *end)

    def _block(self, stage: int, index: int) -> DualPath:
        width = self.width << stage
        inner = self.inner << stage
        growth = self.growths[stage]
        stride = 2 if stage > 0 and index == 0 else 1
        conv = partial(_norm_relu_conv, epsilon=1e-3)
        return DualPath(
            scope=f"stage{stage + 1}_block{index}",
            body=(
                *conv(inner, 1),
                *conv(inner, 3, stride, self.groups),
                *conv(width + growth, 1),
            ),
            added=width,
            shortcut=conv(width + 2 * growth, 1, stride) if index == 0 else (),
        )
