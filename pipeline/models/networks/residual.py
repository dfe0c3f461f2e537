"""Residual networks (He et al. 2016) and their kin: RegNet, RepVGG and Xception."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import Seq, component
from pipeline.models.blocks.common_blocks import (
    EXPANSION,
    HALVE,
    Stack,
    bottleneck,
    conv_norm,
    imagenet_stem,
    projection,
    squeeze_excite,
)
from pipeline.models.blocks.layered_model import StageBlock, StridedModelSpec, stage_blocks
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


@component("model")
class ResNet(StridedModelSpec):
    """Stages of residual blocks; each stage but the first halves the image.

    ResNets for ImageNet and for CIFAR (He et al. 2016, sec. 4.2), ResNeXt (Xie et al. 2017), wide
    ResNets, and squeeze-and-excitation (Hu et al. 2018).

    A bottleneck puts its stride on the 3x3 convolution. A shortcut is a 1x1 convolution and batch
    norm if the stride or the number of channels changes, else the identity.
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "widths")
    name: Literal["resnet"] = "resnet"
    block: Literal["basic", "bottleneck"]
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    widths: Seq[PositiveInt]
    """Features of the 3x3 convolutions by stage; a bottleneck's output has four times these."""
    stem: Literal["imagenet", "cifar"]
    """imagenet: 7x7/2 convolution and 3x3/2 max pool; cifar: 3x3 convolution."""
    zero_init_last: bool
    """Start the last batch norm of every block at 0, so that fresh blocks are the identity."""
    groups: PositiveInt = 1
    """Groups of a bottleneck's 3x3 convolution: the cardinality of ResNeXt."""
    group_width: PositiveInt = 64
    """Features of each of these groups if the width is 64; in proportion for other widths."""
    squeeze: PositiveInt | None = None
    """Squeeze and excitation ends every block, with channels / squeeze hidden features."""

    @model_validator(mode="after")
    def _groups_are_of_bottlenecks(self) -> Self:
        if self.block == "basic" and (self.groups, self.group_width) != (1, 64):
            raise ValueError(
                f"groups {self.groups} and group_width {self.group_width} are for bottlenecks; "
                "a basic block has 1 and 64"
            )
        return self

    def same_layers_for(self, classes: int) -> Stack:
        width = self.widths[0]
        stem = imagenet_stem(width) if self.stem == "imagenet" else (*conv_norm(width, 3), Relu())
        expansion = EXPANSION[self.block]
        layers: list[LayerSpec] = [*stem]
        for at in stage_blocks(
            self.blocks, self.widths, width, expansion=expansion, halve_first=False
        ):
            layers += (self._block(at), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

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


@component("model")
class ResNetV2(StridedModelSpec):
    """Stages of residual blocks in which batch norm and ReLU come before each convolution.

    Full pre-activation (He et al. 2016, "Identity mappings"), and the wide networks for CIFAR
    (Zagoruyko and Komodakis 2016). If a block changes the shape, its shortcut is a 1x1 convolution
    of the activated input, and follows the first batch norm and ReLU, as the residual does.
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "widths")
    name: Literal["resnet_v2"] = "resnet_v2"
    block: Literal["basic", "bottleneck"]
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    widths: Seq[PositiveInt]
    """Features of the 3x3 convolutions by stage; a bottleneck's output has four times these."""
    stem: Literal["imagenet", "cifar"]
    """imagenet: 7x7/2 convolution and 3x3/2 max pool; cifar: 3x3 convolution."""
    stem_width: PositiveInt
    """Features of the first convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]
    """Rate of the dropout before the 3x3 convolution, or before the second one of a basic block."""

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
        return Conv(features=self.stem_width, kernel=7, stride=2), HALVE

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


@component("model")
class RegNetX(StridedModelSpec):
    """Stages of residual blocks with group convolutions and no bottleneck; each stage halves.

    Radosavovic et al. 2020.
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "widths")
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
    def _groups_divide_widths(self) -> Self:
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


@component("model")
class RepVGG(StridedModelSpec):
    """Blocks that add a 3x3, a 1x1 and, if the shape stays, the input, each normalised.

    RepVGG as it is trained (Ding et al. 2021).
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "widths")
    name: Literal["repvgg"] = "repvgg"
    stem: PositiveInt
    """Features of the first block."""
    blocks: Seq[Count]
    """Number of blocks of each stage; the first one halves the image."""
    widths: Seq[PositiveInt]
    """Features of the blocks, stage by stage."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [_rep_block("stem", self.stem, 2, same=False), Relu()]
        for at in stage_blocks(self.blocks, self.widths, self.stem):
            same = at.stride == 1 and at.channels == at.width
            layers += (_rep_block(at.scope, at.width, at.stride, same), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))


def _rep_block(scope: str, features: int, stride: int, same: bool) -> Residual:
    body = conv_norm(features, 3, stride)
    shortcut = conv_norm(features, 1, stride)
    if not same:
        return Residual(scope=scope, body=body, shortcut=shortcut)
    convs = Residual(scope="convs", body=body, shortcut=shortcut)
    return Residual(scope=scope, body=(convs,), shortcut=(BatchNorm(),))


_FEATURES = (32, 64, 128, 256, 728, 1024, 1536, 2048)


@component("model")
class Xception(StridedModelSpec):
    """Residual blocks of depthwise separable convolutions, for images of 299x299.

    Chollet 2017, fig. 5. With 1000 classes it has 22,855,952 parameters.
    """

    name: Literal["xception"] = "xception"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    middle: Count
    """Number of blocks that keep the size; the paper has 8."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        w = [max(1, round(features * self.width)) for features in _FEATURES]
        middle = _after_relu(w[4], w[4]) * 3
        return (
            *conv_norm(w[0], 3, 2, padding="valid"),
            Relu(),
            *conv_norm(w[1], 3, padding="valid"),
            Relu(),
            _halving("entry0", _separable(w[1], w[2]), w[2], w[2]),
            _halving("entry1", _after_relu(w[2], w[3]), w[3], w[3]),
            _halving("entry2", _after_relu(w[3], w[4]), w[4], w[4]),
            *(Residual(scope=f"middle{i}", body=middle) for i in range(self.middle)),
            _halving("exit", _after_relu(w[4], w[4]), w[4], w[5]),
            *_separable(w[5], w[6]),
            Relu(),
            *_separable(w[6], w[7]),
            Relu(),
            GlobalAvgPool(),
            Dense(features=classes),
        )


def _separable(channels: int, features: int) -> Stack:
    """A 3x3 of every single channel, then a 1x1 of all, and batch norm."""
    depthwise = Conv(features=channels, kernel=3, groups=channels)
    return depthwise, Conv(features=features, kernel=1), BatchNorm()


def _after_relu(channels: int, features: int) -> Stack:
    return (Relu(), *_separable(channels, features))


def _halving(scope: str, first: Stack, channels: int, features: int) -> Residual:
    """Layers `first` to `channels`, a separable convolution to `features`, and a pool."""
    body = (*first, *_after_relu(channels, features), HALVE)
    return Residual(scope=scope, body=body, shortcut=conv_norm(features, 1, 2))
