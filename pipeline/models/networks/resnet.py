"""Residual networks for ImageNet (M-03) and for CIFAR (He et al. 2016, sec. 4.2), and their kin:
ResNeXt (Xie et al. 2017), wide ResNets and squeeze-and-excitation (Hu et al. 2018)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.models.fields import Count
from pipeline.models.layers import BatchNorm, Dense, GlobalAvgPool, MaxPool, Relu, Residual
from pipeline.models.spec import LayerSpec
from pipeline.models.stacks import Stack, conv_norm, squeeze_excite
from pipeline.models.strided import StridedModelSpec
from pipeline.registry import Seq, part

_EXPANSION = {"basic": 1, "bottleneck": 4}


@part("model")
class ResNet(StridedModelSpec):
    """Stages of residual blocks; each stage but the first halves the image.

    A bottleneck puts its stride on the 3x3 convolution. A shortcut is a 1x1 convolution and batch
    norm where the stride or the number of channels changes, else the identity.
    """

    name: Literal["resnet"] = "resnet"
    block: Literal["basic", "bottleneck"]
    blocks: Seq[Count]
    """How many blocks each stage has."""
    widths: Seq[PositiveInt]
    """Features of the 3x3 convolutions, stage by stage; a bottleneck gives four times as many."""
    stem: Literal["imagenet", "cifar"]
    """imagenet: 7x7/2 convolution and 3x3/2 max pool; cifar: 3x3 convolution."""
    zero_init_last: bool
    """Start the last batch norm of every block at 0, so that fresh blocks are the identity."""
    groups: PositiveInt = 1
    """Groups of a bottleneck's 3x3 convolution: the cardinality of ResNeXt."""
    group_width: PositiveInt = 64
    """Features of each of these groups where the width is 64, and in proportion where it is not."""
    squeeze: PositiveInt | None = None
    """Squeeze and excitation ends every block, with one hidden feature for so many channels."""

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        if not self.blocks or len(self.blocks) != len(self.widths):
            raise ValueError(
                f"blocks {list(self.blocks)} and widths {list(self.widths)} must have one entry "
                "per stage each"
            )
        if self.block == "basic" and (self.groups, self.group_width) != (1, 64):
            raise ValueError(
                f"groups {self.groups} and group_width {self.group_width} are for bottlenecks; "
                "a basic block has 1 and 64"
            )
        return self

    def same_layers_for(self, classes: int) -> Stack:
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
            convs = (*conv_norm(width, 3, stride), Relu(), *conv_norm(features, 3))
        else:
            inner = width * self.group_width // 64 * self.groups
            convs = (
                *conv_norm(inner, 1),
                Relu(),
                *conv_norm(inner, 3, stride, groups=self.groups),
                Relu(),
                *conv_norm(features, 1),
            )
        last = BatchNorm(scale_init=0.0 if self.zero_init_last else 1.0)
        gate = (squeeze_excite(features, features // self.squeeze),) if self.squeeze else ()
        changes = stride != 1 or channels != features
        shortcut = conv_norm(features, 1, stride) if changes else ()
        return Residual(scope=scope, body=(*convs[:-1], last, *gate), shortcut=shortcut)


def _stem(stem: Literal["imagenet", "cifar"], width: int) -> Stack:
    if stem == "cifar":
        return (*conv_norm(width, 3), Relu())
    return (*conv_norm(width, 7, 2), Relu(), MaxPool(kernel=3, stride=2, padding="same"))
