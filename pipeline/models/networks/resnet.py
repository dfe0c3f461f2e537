"""Residual networks for ImageNet (M-03) and for CIFAR (He et al. 2016, sec. 4.2)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.models.layers import (
    BatchNorm,
    Conv,
    Dense,
    GlobalAvgPool,
    MaxPool,
    Relu,
    Residual,
)
from pipeline.models.spec import LayerSpec, ModelSpec
from pipeline.registry import Seq, part

_EXPANSION = {"basic": 1, "bottleneck": 4}

Stack = tuple[LayerSpec, ...]


@part("model")
class ResNet(ModelSpec):
    """Stages of residual blocks; each stage but the first halves the image.

    A bottleneck puts its stride on the 3x3 convolution. A shortcut is a 1x1 convolution and batch
    norm where the stride or the number of channels changes, else the identity.
    """

    name: Literal["resnet"] = "resnet"
    block: Literal["basic", "bottleneck"]
    blocks: Seq[PositiveInt]
    """How many blocks each stage has."""
    widths: Seq[PositiveInt]
    """Features of the 3x3 convolutions, stage by stage; a bottleneck gives four times as many."""
    stem: Literal["imagenet", "cifar"]
    """imagenet: 7x7/2 convolution and 3x3/2 max pool; cifar: 3x3 convolution."""
    zero_init_last: bool
    """Start the last batch norm of every block at 0, so that fresh blocks are the identity."""

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        if not self.blocks or len(self.blocks) != len(self.widths):
            raise ValueError(
                f"blocks {list(self.blocks)} and widths {list(self.widths)} must have one entry "
                "per stage each"
            )
        return self

    def layers_for(self, classes: int) -> Stack:
        return (
            *_stem(self.stem, self.widths[0]),
            *self._stages(),
            GlobalAvgPool(),
            Dense(features=classes),
        )

    def _stages(self) -> list[LayerSpec]:
        layers: list[LayerSpec] = []
        channels = self.widths[0]
        for stage, (count, width) in enumerate(zip(self.blocks, self.widths, strict=True), start=1):
            for index in range(count):
                stride = 2 if stage > 1 and index == 0 else 1
                scope = f"stage{stage}_block{index}"
                layers += (self._block(scope, channels, width, stride), Relu())
                channels = width * _EXPANSION[self.block]
        return layers

    def _block(self, scope: str, channels: int, width: int, stride: int) -> Residual:
        features = width * _EXPANSION[self.block]
        if self.block == "basic":
            convs = (*_conv(width, 3, stride), Relu(), Conv(features=features, kernel=3))
        else:
            convs = (
                *_conv(width, 1),
                Relu(),
                *_conv(width, 3, stride),
                Relu(),
                Conv(features=features, kernel=1),
            )
        last = BatchNorm(scale_init=0.0 if self.zero_init_last else 1.0)
        changes = stride != 1 or channels != features
        shortcut = _conv(features, 1, stride) if changes else ()
        return Residual(scope=scope, body=(*convs, last), shortcut=shortcut)


def _stem(stem: Literal["imagenet", "cifar"], width: int) -> Stack:
    if stem == "cifar":
        return (*_conv(width, 3), Relu())
    return (*_conv(width, 7, 2), Relu(), MaxPool(kernel=3, stride=2, padding="same"))


def _conv(features: int, kernel: int, stride: int = 1) -> Stack:
    return (Conv(features=features, kernel=kernel, stride=stride), BatchNorm())
