"""Residual networks for ImageNet (M-03) and for CIFAR (He et al. 2016, sec. 4.2), and their kin:
ResNeXt (Xie et al. 2017), wide ResNets and squeeze-and-excitation (Hu et al. 2018)."""

from __future__ import annotations

from typing import Literal, Self

from pydantic import PositiveInt, model_validator

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import (
    EXPANSION,
    Stack,
    bottleneck,
    conv_norm,
    imagenet_stem,
    projection,
    squeeze_excite,
)
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.blocks.residual_stages import StageBlock, check_stages, stage_blocks
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import BatchNorm, Dense, GlobalAvgPool, Relu, Residual


@part("model")
class ResNet(StridedModelSpec):
    """Stages of residual blocks; each stage but the first halves the image.

    A bottleneck puts its stride on the 3x3 convolution. A shortcut is a 1x1 convolution and batch
    norm where the stride or the number of channels changes, else the identity.
    """

    name: Literal["resnet"] = "resnet"
    block: Literal["basic", "bottleneck"]
    blocks: Seq[Count]
    """Number of blocks of each stage."""
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
    """Squeeze and excitation ends every block, with channels / squeeze hidden features."""

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        check_stages(blocks=self.blocks, widths=self.widths)
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
        expansion = EXPANSION[self.block]
        blocks = stage_blocks(
            self.blocks, self.widths, self.widths[0], expansion=expansion, halve_first=False
        )
        return [layer for at in blocks for layer in (self._block(at), Relu())]

    def _block(self, at: StageBlock) -> Residual:
        features = at.width * EXPANSION[self.block]
        if self.block == "basic":
            convs = (*conv_norm(at.width, 3, at.stride), Relu(), *conv_norm(features, 3))
        else:
            inner = at.width * self.group_width // 64 * self.groups
            convs = bottleneck(inner, features, at.stride, self.groups)
        last = BatchNorm(scale_init=0.0 if self.zero_init_last else 1.0)
        gate = (squeeze_excite(features, features // self.squeeze),) if self.squeeze else ()
        shortcut = projection(at.channels, features, at.stride)
        return Residual(scope=at.scope, body=(*convs[:-1], last, *gate), shortcut=shortcut)


def _stem(stem: Literal["imagenet", "cifar"], width: int) -> Stack:
    if stem == "cifar":
        return (*conv_norm(width, 3), Relu())
    return imagenet_stem(width)
