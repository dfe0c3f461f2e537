"""Residual networks: ResNet (He et al. 2016), RegNet, RepVGG and Xception."""

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
    make_shortcut,
    squeeze_excite,
)
from pipeline.models.blocks.layered_model import StageBlock, StridedModelSpec, plan_blocks
from pipeline.models.layers.model_spec import Count, LayerSpec
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
    """Whether the last batch norm of a block starts at 0, so that new blocks are the identity."""
    groups: PositiveInt = 1
    """Groups of a bottleneck's 3x3 convolution, the cardinality of ResNeXt."""
    group_width: PositiveInt = 64
    """Features of each group for a width of 64; in proportion for other widths."""
    squeeze: PositiveInt | None = None
    """Divisor of the hidden features of squeeze and excitation in every block; null: without it."""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.block == "basic" and (self.groups, self.group_width) != (1, 64):
            raise ValueError(
                f"groups {self.groups} and group_width {self.group_width} are for bottlenecks; "
                "must be 1 and 64 for basic blocks"
            )
        return self

    def same_layers_for(self, classes: int) -> Stack:
        width = self.widths[0]
        stem = imagenet_stem(width) if self.stem == "imagenet" else (*conv_norm(width, 3), Relu())
        expansion = EXPANSION[self.block]
        layers: list[LayerSpec] = [*stem]
        for block in plan_blocks(
            self.blocks, self.widths, width, expansion=expansion, halve_first=False
        ):
            layers += (self._make_block(block), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _make_block(self, block: StageBlock) -> Residual:
        features = block.width * EXPANSION[self.block]
        if self.block == "basic":
            convs = (*conv_norm(block.width, 3, block.stride), Relu(), *conv_norm(features, 3))
        else:
            hidden = block.width * self.group_width // 64 * self.groups
            convs = bottleneck(hidden, features, block.stride, self.groups)
        # The last layer of `convs` is a batch norm with the default scale.
        norm = BatchNorm(scale_init=0.0 if self.zero_init_last else 1.0)
        gate = (squeeze_excite(features, features // self.squeeze),) if self.squeeze else ()
        shortcut = make_shortcut(block.channels, features, block.stride)
        return Residual(scope=block.scope, body=(*convs[:-1], norm, *gate), shortcut=shortcut)


@component("model")
class ResNetV2(StridedModelSpec):
    """Stages of residual blocks with batch norm and ReLU before each convolution.

    Full pre-activation (He et al. 2016, "Identity mappings"), and the wide networks for CIFAR
    (Zagoruyko and Komodakis 2016). If a block changes the shape, its shortcut is a 1x1 convolution
    after the first batch norm and ReLU.
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
    """Rate of dropout before a bottleneck's 3x3, or a basic block's second convolution."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        expansion = EXPANSION[self.block]
        blocks = plan_blocks(
            self.blocks, self.widths, self.stem_width, expansion=expansion, halve_first=False
        )
        end = (BatchNorm(), Relu(), GlobalAvgPool(), Dense(features=classes))
        return (*self._make_stem(), *map(self._make_block, blocks), *end)

    def _make_stem(self) -> Stack:
        if self.stem == "cifar":
            return (Conv(features=self.stem_width, kernel=3),)
        return Conv(features=self.stem_width, kernel=7, stride=2), HALVE

    def _make_block(self, block: StageBlock) -> LayerSpec:
        features = block.width * EXPANSION[self.block]
        activate = (BatchNorm(), Relu())
        body = self._make_convs(block.width, features, block.stride)
        if block.stride == 1 and block.channels == features:
            return Residual(scope=block.scope, body=(*activate, *body))
        shortcut = (Conv(features=features, kernel=1, stride=block.stride),)
        return Sequence(scope=block.scope, body=(*activate, Residual(body=body, shortcut=shortcut)))

    def _make_convs(self, width: int, features: int, stride: int) -> Stack:
        activate = (BatchNorm(), Relu())
        activate_and_drop = (*activate, Dropout(rate=self.dropout)) if self.dropout else activate
        if self.block == "basic":
            first = Conv(features=width, kernel=3, stride=stride)
            return first, *activate_and_drop, Conv(features=features, kernel=3)
        middle = Conv(features=width, kernel=3, stride=stride)
        last = Conv(features=features, kernel=1)
        return Conv(features=width, kernel=1), *activate_and_drop, middle, *activate, last


@component("model")
class RegNetX(StridedModelSpec):
    """Stages of residual blocks with group convolutions; each stage halves the image.

    Radosavovic et al. 2020.
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "widths")
    name: Literal["regnet_x"] = "regnet_x"
    stem: PositiveInt
    """Features of the first convolution."""
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    widths: Seq[PositiveInt]
    """Features of the blocks, by stage."""
    group_width: PositiveInt
    """Features of each group of a 3x3 convolution."""

    @model_validator(mode="after")
    def _check_widths(self) -> Self:
        for width in self.widths:
            if width % self.group_width:
                raise ValueError(
                    f"widths {list(self.widths)} must be multiples of group_width "
                    f"{self.group_width}; {width} is not"
                )
        return self

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*conv_norm(self.stem, 3, 2), Relu()]
        for block in plan_blocks(self.blocks, self.widths, self.stem):
            layers += (self._make_block(block), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _make_block(self, block: StageBlock) -> Residual:
        body = bottleneck(block.width, block.width, block.stride, block.width // self.group_width)
        shortcut = make_shortcut(block.channels, block.width, block.stride)
        return Residual(scope=block.scope, body=body, shortcut=shortcut)


@component("model")
class RepVGG(StridedModelSpec):
    """Blocks that add a 3x3, a 1x1 and, if the shape stays, the input, each after batch norm.

    RepVGG in the form for training (Ding et al. 2021).
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "widths")
    name: Literal["repvgg"] = "repvgg"
    stem: PositiveInt
    """Features of the first block."""
    blocks: Seq[Count]
    """Number of blocks of each stage; the first block halves the image."""
    widths: Seq[PositiveInt]
    """Features of the blocks, by stage."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [_make_rep_block("stem", self.stem, 2, keeps_shape=False), Relu()]
        for block in plan_blocks(self.blocks, self.widths, self.stem):
            keeps_shape = block.stride == 1 and block.channels == block.width
            layers += (_make_rep_block(block.scope, block.width, block.stride, keeps_shape), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))


def _make_rep_block(scope: str, features: int, stride: int, keeps_shape: bool) -> Residual:
    body = conv_norm(features, 3, stride)
    shortcut = conv_norm(features, 1, stride)
    if not keeps_shape:
        return Residual(scope=scope, body=body, shortcut=shortcut)
    convs = Residual(scope="convs", body=body, shortcut=shortcut)
    return Residual(scope=scope, body=(convs,), shortcut=(BatchNorm(),))


_FEATURES = (32, 64, 128, 256, 728, 1024, 1536, 2048)
"""The different features of Xception's convolutions."""


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
        widths = [max(1, round(features * self.width)) for features in _FEATURES]
        stem0, stem1, entry0, entry1, middle, exit0, exit1, exit2 = widths
        middle_body = _make_relu_separable(middle, middle) * 3
        return (
            *conv_norm(stem0, 3, 2, padding="valid"),
            Relu(),
            *conv_norm(stem1, 3, padding="valid"),
            Relu(),
            _make_halving("entry0", _make_separable(stem1, entry0), entry0, entry0),
            _make_halving("entry1", _make_relu_separable(entry0, entry1), entry1, entry1),
            _make_halving("entry2", _make_relu_separable(entry1, middle), middle, middle),
            *(Residual(scope=f"middle{i}", body=middle_body) for i in range(self.middle)),
            _make_halving("exit", _make_relu_separable(middle, middle), middle, exit0),
            *_make_separable(exit0, exit1),
            Relu(),
            *_make_separable(exit1, exit2),
            Relu(),
            GlobalAvgPool(),
            Dense(features=classes),
        )


def _make_separable(channels: int, features: int) -> Stack:
    """Return a depthwise 3x3, a 1x1 convolution and batch norm."""
    depthwise = Conv(features=channels, kernel=3, groups=channels)
    return depthwise, Conv(features=features, kernel=1), BatchNorm()


def _make_relu_separable(channels: int, features: int) -> Stack:
    return (Relu(), *_make_separable(channels, features))


def _make_halving(scope: str, first: Stack, channels: int, features: int) -> Residual:
    """Return a residual block that halves the image and has `features` features.

    The body is `first`, which has `channels` features, a separable convolution, and a max pool.
    """
    body = (*first, *_make_relu_separable(channels, features), HALVE)
    return Residual(scope=scope, body=body, shortcut=conv_norm(features, 1, 2))
