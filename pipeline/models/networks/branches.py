"""Networks with branches: GoogLeNet, Inception v3, DenseNet, dual path networks and U-Net."""

from __future__ import annotations

from functools import partial
from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.models.blocks.common_blocks import HALVE, Stack, conv_norm, imagenet_stem
from pipeline.models.blocks.layered_model import LayeredModelSpec, StridedModelSpec
from pipeline.models.layers.model_spec import Count, LayerSpec, Padding, Size
from pipeline.models.layers.standard import (
    AvgPool,
    BatchNorm,
    Branches,
    Conv,
    ConvTranspose,
    Dense,
    Dropout,
    DualPath,
    GlobalAvgPool,
    MaxPool,
    Relu,
)

_INCEPTION_FEATURES = {
    "3a": (64, 96, 128, 16, 32, 32),
    "3b": (128, 128, 192, 32, 96, 64),
    "4a": (192, 96, 208, 16, 48, 64),
    "4b": (160, 112, 224, 24, 64, 64),
    "4c": (128, 128, 256, 24, 64, 64),
    "4d": (112, 144, 288, 32, 64, 64),
    "4e": (256, 160, 320, 32, 128, 128),
    "5a": (256, 160, 320, 32, 128, 128),
    "5b": (384, 192, 384, 48, 128, 128),
}
"""Features of the convolutions of each module (table 1): of the 1x1 branch, of a 1x1 and a 3x3 in
each of two branches, and of the 1x1 after the pool."""


@component("model")
class GoogLeNet(StridedModelSpec):
    """Nine inception modules of four parallel branches (Szegedy et al. 2015).

    As in MindSpore's model zoo and torchvision, the paper's 5x5 branch is 3x3, without
    auxiliary classifiers. With 1000 classes it has 6,624,904 parameters.
    """

    name: Literal["googlenet"] = "googlenet"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        stem = (*self._conv(64, 7, 2), HALVE, *self._conv(64, 1), *self._conv(192, 3), HALVE)
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        first, second, third = (self._make_stage(stage) for stage in "345")
        return (*stem, *first, HALVE, *second, MaxPool(kernel=2), *third, *head)

    def _make_stage(self, stage: str) -> list[LayerSpec]:
        return [
            Branches(scope=f"inception{name}", branches=self._make_branches(features))
            for name, features in _INCEPTION_FEATURES.items()
            if name.startswith(stage)
        ]

    def _make_branches(self, features: tuple[int, ...]) -> tuple[Stack, ...]:
        pointwise, first_hidden, first, second_hidden, second, pooled = features
        pool = MaxPool(kernel=3, stride=1, padding="same")
        return (
            self._conv(pointwise, 1),
            (*self._conv(first_hidden, 1), *self._conv(first, 3)),
            (*self._conv(second_hidden, 1), *self._conv(second, 3)),
            (pool, *self._conv(pooled, 1)),
        )

    def _conv(self, features: int, kernel: int, stride: int = 1) -> Stack:
        return _make_scaled_conv(self.width, features, kernel, stride)


def _make_scaled_conv(
    width: float, features: int, kernel: Size, stride: int, padding: Padding = "same"
) -> Stack:
    features = max(1, round(features * width))
    return (*conv_norm(features, kernel, stride, padding=padding, epsilon=1e-3), Relu())


_VALID_POOL = MaxPool(kernel=3, stride=2)
_AVERAGE_POOL = AvgPool(kernel=3, stride=1, padding="same")
_ROW_KERNEL = (1, 7)
_COLUMN_KERNEL = (7, 1)


@component("model")
class InceptionV3(LayeredModelSpec):
    """Eleven inception modules of five kinds, for images of 299x299.

    Szegedy et al. 2016, table 1, without the auxiliary classifier. With 1000 classes it has
    23,834,568 parameters.
    """

    name: Literal["inception_v3"] = "inception_v3"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        pooled_features = (32, 64, 64)
        inner_features = (128, 160, 160, 192)
        return (
            *self._make_stem(),
            *(self._make_square_module(f"square{i}", n) for i, n in enumerate(pooled_features)),
            self._make_first_reduction(),
            *(self._make_factored_module(f"factored{i}", n) for i, n in enumerate(inner_features)),
            self._make_second_reduction(),
            *(self._make_expanded_module(f"expanded{i}") for i in range(2)),
            GlobalAvgPool(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _conv(self, features: int, kernel: Size, stride: int = 1, pad: Padding = "same") -> Stack:
        return _make_scaled_conv(self.width, features, kernel, stride, pad)

    def _convs(self, *convs: tuple[int, Size]) -> Stack:
        return tuple(layer for features, kernel in convs for layer in self._conv(features, kernel))

    def _make_stem(self) -> Stack:
        return (
            *self._conv(32, 3, 2, pad="valid"),
            *self._conv(32, 3, pad="valid"),
            *self._conv(64, 3),
            _VALID_POOL,
            *self._conv(80, 1),
            *self._conv(192, 3, pad="valid"),
            _VALID_POOL,
        )

    def _make_square_module(self, scope: str, pooled: int) -> Branches:
        branches = (
            self._conv(64, 1),
            self._convs((48, 1), (64, 5)),
            self._convs((64, 1), (96, 3), (96, 3)),
            (_AVERAGE_POOL, *self._conv(pooled, 1)),
        )
        return Branches(scope=scope, branches=branches)

    def _make_first_reduction(self) -> Branches:
        double_conv = (*self._convs((64, 1), (96, 3)), *self._conv(96, 3, 2, pad="valid"))
        branches = (self._conv(384, 3, 2, pad="valid"), double_conv, (_VALID_POOL,))
        return Branches(scope="reduction0", branches=branches)

    def _make_factored_module(self, scope: str, inner: int) -> Branches:
        row = (inner, _ROW_KERNEL)
        column = (inner, _COLUMN_KERNEL)
        branches = (
            self._conv(192, 1),
            self._convs((inner, 1), row, (192, _COLUMN_KERNEL)),
            self._convs((inner, 1), column, row, column, (192, _ROW_KERNEL)),
            (_AVERAGE_POOL, *self._conv(192, 1)),
        )
        return Branches(scope=scope, branches=branches)

    def _make_second_reduction(self) -> Branches:
        square_branch = (*self._conv(192, 1), *self._conv(320, 3, 2, pad="valid"))
        factored = self._convs((192, 1), (192, _ROW_KERNEL), (192, _COLUMN_KERNEL))
        factored_branch = (*factored, *self._conv(192, 3, 2, pad="valid"))
        branches = (square_branch, factored_branch, (_VALID_POOL,))
        return Branches(scope="reduction1", branches=branches)

    def _make_expanded_module(self, scope: str) -> Branches:
        pair = Branches(branches=(self._conv(384, (1, 3)), self._conv(384, (3, 1))))
        branches = (
            self._conv(320, 1),
            (*self._conv(384, 1), pair),
            (*self._convs((448, 1), (384, 3)), pair),
            (_AVERAGE_POOL, *self._conv(192, 1)),
        )
        return Branches(scope=scope, branches=branches)


@component("model")
class DenseNet(StridedModelSpec):
    """Dense blocks, in which every layer reads all features before it: DenseNet-BC.

    Huang et al. 2017, sec. 3. Between two blocks a 1x1 convolution halves the features, and an
    average pool halves the image.
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
                layers += (*_make_norm_relu_conv(channels, 1), AvgPool(kernel=2))
            layers += [self._make_layer(f"block{number}_layer{index}") for index in range(count)]
            channels += count * self.growth
        return (*layers, BatchNorm(), Relu(), GlobalAvgPool(), Dense(features=classes))

    def _make_layer(self, scope: str) -> Branches:
        body = (*_make_norm_relu_conv(4 * self.growth, 1), *_make_norm_relu_conv(self.growth, 3))
        return Branches(scope=scope, branches=((), body))


def _make_norm_relu_conv(
    features: int, kernel: int, stride: int = 1, groups: int = 1, *, epsilon: float = 1e-5
) -> Stack:
    conv = Conv(features=features, kernel=kernel, stride=stride, groups=groups)
    return BatchNorm(epsilon=epsilon), Relu(), conv


@component("model")
class DualPathNetwork(StridedModelSpec):
    """Blocks that add to some channels, like a ResNet, and append channels, like a DenseNet.

    Chen et al. 2017, table 1.
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("blocks", "growths")
    name: Literal["dpn"] = "dpn"
    stem: PositiveInt
    """Features of the first convolution."""
    width: PositiveInt
    """Features that the first stage adds to, doubled by each later stage."""
    inner: PositiveInt
    """Features of the 3x3 convolutions of the first stage, doubled by each later stage."""
    groups: PositiveInt
    """Groups of the 3x3 convolutions."""
    blocks: Seq[Count]
    """Number of blocks of each stage."""
    growths: Seq[PositiveInt]
    """Features that a block appends, by stage; the first block appends three times the number."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*imagenet_stem(self.stem, epsilon=1e-3)]
        for stage, count in enumerate(self.blocks):
            layers += [self._make_block(stage, index) for index in range(count)]
        end = (BatchNorm(epsilon=1e-3), Relu(), GlobalAvgPool(), Dense(features=classes))
        return (*layers, *end)

    def _make_block(self, stage: int, index: int) -> DualPath:
        width = self.width << stage
        inner = self.inner << stage
        growth = self.growths[stage]
        stride = 2 if stage > 0 and index == 0 else 1
        conv = partial(_make_norm_relu_conv, epsilon=1e-3)
        return DualPath(
            scope=f"stage{stage + 1}_block{index}",
            body=(*conv(inner, 1), *conv(inner, 3, stride, self.groups), *conv(width + growth, 1)),
            added=width,
            shortcut=conv(width + 2 * growth, 1, stride) if index == 0 else (),
        )


@component("model")
class UNet(LayeredModelSpec):
    """A classifier of pixels: logits (batch, height, width, classes) (Ronneberger et al. 2015).

    Each depth begins with two 3x3 convolutions. Their output is pooled for the depth below. The
    result of the depth below is enlarged and joined to that output, for two more 3x3 convolutions.
    The lowest depth has only the first two. Unlike in the paper, convolutions are padded, so they
    keep the size of the image. Its sides must be multiples of 2 ** (number of depths - 1).
    """

    name: Literal["unet"] = "unet"
    widths: Annotated[Seq[PositiveInt], Field(min_length=2)]
    """Features of the convolutions, by depth."""
    batch_norm: bool
    """Whether 3x3 convolutions have batch norm instead of a bias; not in the paper."""

    def layers_for(self, classes: int) -> Stack:
        return (*self._make_depth(0), Conv(features=classes, kernel=1, bias=True))

    def _make_depth(self, depth: int) -> Stack:
        """Return the layers of this depth and the depths below, which keep the image's size."""
        convs = self._make_convs(self.widths[depth])
        if depth == len(self.widths) - 1:
            return convs
        up = ConvTranspose(features=self.widths[depth], kernel=2, stride=2, bias=True)
        below = (MaxPool(kernel=2), *self._make_depth(depth + 1), up)
        return (*convs, Branches(scope=f"below{depth}", branches=((), below)), *convs)

    def _make_convs(self, features: int) -> Stack:
        conv: Stack = (Conv(features=features, kernel=3, bias=True),)
        if self.batch_norm:
            conv = conv_norm(features, 3)
        return (*conv, Relu()) * 2
