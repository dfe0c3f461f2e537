"""Small networks: MobileNets, EfficientNet, ShuffleNet V2 and SqueezeNet."""

from __future__ import annotations

from math import ceil
from typing import Annotated, ClassVar, Literal, NamedTuple

from pydantic import Field, PositiveFloat, PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.models.blocks.common_blocks import (
    HALVE,
    Depthwise,
    Stack,
    conv_norm,
    inverted_bottleneck,
    residual_if,
    round_features,
    squeeze_excite,
)
from pipeline.models.blocks.layered_model import LayeredModelSpec, StridedModelSpec, plan_blocks
from pipeline.models.layers.model_spec import Count, LayerSpec
from pipeline.models.layers.standard import (
    Branches,
    ChannelShuffle,
    Conv,
    Dense,
    Dropout,
    GlobalAvgPool,
    HardSigmoid,
    HardSwish,
    MaxPool,
    Relu,
    Relu6,
    Swish,
)

_ROWS_V1 = (
    (64, 1),
    (128, 2),
    (128, 1),
    (256, 2),
    (256, 1),
    (512, 2),
    *((512, 1),) * 5,
    (1024, 2),
    (1024, 1),
)
"""Features of each 1x1 convolution, and stride of the depthwise convolution before it (table 1)."""


@component("model")
class MobileNetV1(StridedModelSpec):
    """13 pairs of a depthwise 3x3 and a 1x1 convolution (Howard et al. 2017).

    With 1000 classes and width 1 it has 4,231,976 parameters.
    """

    name: Literal["mobilenet_v1"] = "mobilenet_v1"
    width: PositiveFloat
    """Factor on the paper's features of every convolution, rounded down."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = self._scale(32)
        layers: Stack = (*conv_norm(channels, 3, 2), Relu())
        for features, stride in _ROWS_V1:
            depthwise = conv_norm(channels, 3, stride, groups=channels)
            channels = self._scale(features)
            layers += (*depthwise, Relu(), *conv_norm(channels, 1), Relu())
        return (*layers, GlobalAvgPool(), Dense(features=classes))

    def _scale(self, features: int) -> int:
        return max(1, int(features * self.width))


_ROWS_V2 = (
    (1, 16, 1, 1),
    (6, 24, 2, 2),
    (6, 32, 3, 2),
    (6, 64, 4, 2),
    (6, 96, 3, 1),
    (6, 160, 3, 2),
    (6, 320, 1, 1),
)
"""Expansion, features, blocks and stride of the first block (table 2)."""


@component("model")
class MobileNetV2(StridedModelSpec):
    """Inverted residuals: expand by a 1x1, filter by a depthwise 3x3, project by a linear 1x1.

    Sandler et al. 2018. With 1000 classes and width 1 it has 3,504,872 parameters.
    """

    name: Literal["mobilenet_v2"] = "mobilenet_v2"
    width: PositiveFloat
    """Factor on the paper's features of every block, in multiples of 8."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = round_features(32 * self.width)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), Relu6()]
        for row, (expansion, base_features, blocks, first_stride) in enumerate(_ROWS_V2):
            features = round_features(base_features * self.width)
            for index in range(blocks):
                stride = first_stride if index == 0 else 1
                depthwise = Depthwise(expansion * channels, 3, stride)
                body = inverted_bottleneck(channels, depthwise, features, Relu6())
                keeps_shape = stride == 1 and channels == features
                layers.append(residual_if(keeps_shape, f"stage{row}_block{index}", body))
                channels = features
        last_features = round_features(1280 * max(1.0, self.width))
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        return (*layers, *conv_norm(last_features, 1), Relu6(), *head)


class _Row(NamedTuple):
    """A block: a row of table 1 or 2."""

    kernel: int
    hidden: int
    features: int
    squeeze: bool
    """Whether the block has squeeze and excitation."""
    hard: bool
    """Whether the activation is hard swish; else it is ReLU."""
    stride: int


_LARGE = (
    _Row(3, 16, 16, False, False, 1),
    _Row(3, 64, 24, False, False, 2),
    _Row(3, 72, 24, False, False, 1),
    _Row(5, 72, 40, True, False, 2),
    _Row(5, 120, 40, True, False, 1),
    _Row(5, 120, 40, True, False, 1),
    _Row(3, 240, 80, False, True, 2),
    _Row(3, 200, 80, False, True, 1),
    _Row(3, 184, 80, False, True, 1),
    _Row(3, 184, 80, False, True, 1),
    _Row(3, 480, 112, True, True, 1),
    _Row(3, 672, 112, True, True, 1),
    _Row(5, 672, 160, True, True, 2),
    _Row(5, 960, 160, True, True, 1),
    _Row(5, 960, 160, True, True, 1),
)
_SMALL = (
    _Row(3, 16, 16, True, False, 2),
    _Row(3, 72, 24, False, False, 2),
    _Row(3, 88, 24, False, False, 1),
    _Row(5, 96, 40, True, True, 2),
    _Row(5, 240, 40, True, True, 1),
    _Row(5, 240, 40, True, True, 1),
    _Row(5, 120, 48, True, True, 1),
    _Row(5, 144, 48, True, True, 1),
    _Row(5, 288, 96, True, True, 2),
    _Row(5, 576, 96, True, True, 1),
    _Row(5, 576, 96, True, True, 1),
)
_SIZES = {"large": (_LARGE, 1280), "small": (_SMALL, 1024)}
"""By size: the blocks, and the features of the hidden dense layer."""


@component("model")
class MobileNetV3(StridedModelSpec):
    """Inverted residuals with squeeze and excitation and hard swish (Howard et al. 2019).

    With 1000 classes and width 1, large has 5,483,032 parameters and small 2,542,856.
    """

    name: Literal["mobilenet_v3"] = "mobilenet_v3"
    size: Literal["large", "small"]
    width: PositiveFloat
    """Factor on the paper's features of every layer, in multiples of 8."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        rows, hidden = _SIZES[self.size]
        channels = self._scale(16)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2), HardSwish()]
        for index, row in enumerate(rows):
            keeps_shape = row.stride == 1 and channels == self._scale(row.features)
            body = self._make_block(channels, row)
            layers.append(residual_if(keeps_shape, f"block{index}", body))
            channels = self._scale(row.features)
        return (
            *layers,
            *conv_norm(6 * channels, 1),
            HardSwish(),
            GlobalAvgPool(),
            Dense(features=self._scale(hidden)),
            HardSwish(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _make_block(self, channels: int, row: _Row) -> Stack:
        hidden = self._scale(row.hidden)
        depthwise = Depthwise(hidden, row.kernel, row.stride)
        gate: Stack = ()
        if row.squeeze:
            gate = (squeeze_excite(hidden, round_features(hidden / 4), last_act=HardSigmoid()),)
        act = HardSwish() if row.hard else Relu()
        return inverted_bottleneck(channels, depthwise, self._scale(row.features), act, gate)

    def _scale(self, features: int) -> int:
        return round_features(features * self.width)


class _Stage(NamedTuple):
    """A stage of table 1; `stride` is for its first block."""

    expansion: int
    kernel: int
    stride: int
    features: int
    blocks: int


_EFFICIENT_STAGES = (
    _Stage(1, 3, 1, 16, 1),
    _Stage(6, 3, 2, 24, 2),
    _Stage(6, 5, 2, 40, 2),
    _Stage(6, 3, 2, 80, 3),
    _Stage(6, 5, 1, 112, 3),
    _Stage(6, 5, 2, 192, 4),
    _Stage(6, 3, 1, 320, 1),
)

_EPSILON = 1e-3
"""Epsilon of batch norm in the reference implementation (tensorflow/tpu)."""


@component("model")
class EfficientNet(StridedModelSpec):
    """Inverted residuals with squeeze and excitation, scaled in width and in depth.

    Tan and Le 2019, without a random drop of blocks. With 1000 classes B0 has 5,288,548 parameters.
    """

    name: Literal["efficientnet"] = "efficientnet"
    width: PositiveFloat
    """Factor on B0's features of every layer, in multiples of 8."""
    depth: Annotated[float, Field(gt=0, le=100)]
    """Factor on B0's number of blocks in each stage, rounded up."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        channels = self._scale(32)
        layers: list[LayerSpec] = [*conv_norm(channels, 3, 2, epsilon=_EPSILON), Swish()]
        for number, row in enumerate(_EFFICIENT_STAGES, start=1):
            features = self._scale(row.features)
            for index in range(ceil(row.blocks * self.depth)):
                stride = row.stride if index == 0 else 1
                keeps_shape = stride == 1 and channels == features
                body = _make_efficient_block(channels, row, features, stride)
                layers.append(residual_if(keeps_shape, f"stage{number}_block{index}", body))
                channels = features
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        last = conv_norm(self._scale(1280), 1, epsilon=_EPSILON)
        return (*layers, *last, Swish(), *head)

    def _scale(self, features: int) -> int:
        return round_features(features * self.width)


def _make_efficient_block(channels: int, row: _Stage, features: int, stride: int) -> Stack:
    hidden = channels * row.expansion
    gate = (squeeze_excite(hidden, max(1, channels // 4), act=Swish()),)
    depthwise = Depthwise(hidden, row.kernel, stride)
    return inverted_bottleneck(channels, depthwise, features, Swish(), gate, epsilon=_EPSILON)


Even = Annotated[PositiveInt, Field(multiple_of=2)]


@component("model")
class ShuffleNetV2(StridedModelSpec):
    """Units that work on half of the channels and shuffle the halves (Ma et al. 2018, fig. 3)."""

    stage_fields: ClassVar[tuple[str, ...]] = ("units", "widths")
    name: Literal["shufflenet_v2"] = "shufflenet_v2"
    stem: PositiveInt
    """Features of the first convolution."""
    units: Seq[Count]
    """Number of units of each stage; the first unit halves the image."""
    widths: Seq[Even]
    """Features of the units, by stage."""
    last: PositiveInt
    """Features of the last convolution."""

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        layers: list[LayerSpec] = [*conv_norm(self.stem, 3, 2), Relu(), HALVE]
        for block in plan_blocks(self.units, self.widths, self.stem):
            # The paper numbers stages from 2.
            scope = f"stage{block.stage + 1}_unit{block.index}"
            unit = _make_unit(scope, block.channels, block.width, block.stride)
            layers += (unit, ChannelShuffle(groups=2))
        head = (GlobalAvgPool(), Dense(features=classes))
        return (*layers, *conv_norm(self.last, 1), Relu(), *head)


def _make_unit(scope: str, channels: int, width: int, stride: int) -> Branches:
    half = width // 2
    body = (*conv_norm(half, 1), Relu(), *_make_depthwise(half, half, stride))
    shortcut = _make_depthwise(channels, half, stride) if stride == 2 else ()
    return Branches(scope=scope, branches=(shortcut, body), split=stride != 2)


def _make_depthwise(channels: int, features: int, stride: int) -> Stack:
    depthwise = conv_norm(channels, 3, stride, groups=channels)
    return (*depthwise, *conv_norm(features, 1), Relu())


@component("model")
class SqueezeNet(LayeredModelSpec):
    """Fire modules: a 1x1 convolution squeezes, a parallel 1x1 and 3x3 expand.

    Iandola et al. 2016, also with bypasses. Each side of the expansion has four times the squeezed
    features. Images are of 224x224 to 227x227. Pools have no partial windows, as in MindSpore's
    model zoo.
    """

    name: Literal["squeezenet"] = "squeezenet"
    stem_features: PositiveInt
    stem_kernel: PositiveInt
    squeezes: Seq[PositiveInt]
    """Features that each fire module squeezes to."""
    pool_after: Seq[PositiveInt]
    """Fire modules, counted from 1, before a max pool; another pool follows the stem."""
    bypass: bool
    """Whether fire modules that keep the number of channels add their input (fig. 2, middle)."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        pool = MaxPool(kernel=3, stride=2)
        stem = Conv(
            features=self.stem_features,
            kernel=self.stem_kernel,
            stride=2,
            padding="valid",
            bias=True,
        )
        layers: list[LayerSpec] = [stem, Relu(), pool]
        channels = self.stem_features
        for number, squeeze in enumerate(self.squeezes, start=1):
            has_bypass = self.bypass and channels == 8 * squeeze
            # The paper numbers fire modules from 2.
            layers.append(residual_if(has_bypass, f"fire{number + 1}", _make_fire(squeeze)))
            if number in self.pool_after:
                layers.append(pool)
            channels = 8 * squeeze
        last = Conv(features=classes, kernel=1, bias=True)
        return (*layers, Dropout(rate=self.dropout), last, Relu(), GlobalAvgPool())


def _make_fire(squeeze: int) -> tuple[LayerSpec, ...]:
    sides = tuple(
        (Conv(features=4 * squeeze, kernel=kernel, bias=True), Relu()) for kernel in (1, 3)
    )
    return Conv(features=squeeze, kernel=1, bias=True), Relu(), Branches(branches=sides)
