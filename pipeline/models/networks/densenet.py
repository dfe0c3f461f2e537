"""Densely connected networks (Huang et al. 2017)."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import Stack, imagenet_stem
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    AvgPool,
    BatchNorm,
    Branches,
    Conv,
    Dense,
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
    """Features that each layer adds; the stem gives twice as many."""
    blocks: Seq[Count]
    """Number of layers of each dense block."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = 2 * self.growth
        layers: list[LayerSpec] = [*imagenet_stem(channels)]
        for number, count in enumerate(self.blocks, start=1):
            if number > 1:
                channels //= 2
                layers += (*_preactivated(channels, 1), AvgPool(kernel=2))
            layers += [self._layer(f"block{number}_layer{index}") for index in range(count)]
            channels += count * self.growth
        return (*layers, BatchNorm(), Relu(), GlobalAvgPool(), Dense(features=classes))

    def _layer(self, scope: str) -> Branches:
        body = (*_preactivated(4 * self.growth, 1), *_preactivated(self.growth, 3))
        return Branches(scope=scope, branches=((), body))


def _preactivated(features: int, kernel: int) -> Stack:
    return BatchNorm(), Relu(), Conv(features=features, kernel=kernel)
