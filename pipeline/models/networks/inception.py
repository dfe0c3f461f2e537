"""Networks of inception modules: GoogLeNet as MindSpore's model zoo has it, and Inception v3."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import HALVE, Stack, conv_norm
from pipeline.models.blocks.layered_model import LayeredModelSpec, StridedModelSpec
from pipeline.models.layers.fields import Padding, Size
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import (
    AvgPool,
    Branches,
    Dense,
    Dropout,
    GlobalAvgPool,
    MaxPool,
    Relu,
)

_INCEPTIONS = {
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
"""Features of the 1x1; before and of one 3x3; before and of the other; after the pool (table 1)."""


@part("model")
class GoogLeNet(StridedModelSpec):
    """Nine inception modules: four branches side by side.

    As in the zoo and in torchvision, the 5x5 branch of the paper is 3x3, without auxiliary
    classifiers. With 1000 classes it has 6,624,904 parameters.
    """

    name: Literal["googlenet"] = "googlenet"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        stem = (*self._conv(64, 7, 2), HALVE, *self._conv(64, 1), *self._conv(192, 3), HALVE)
        head = (GlobalAvgPool(), Dropout(rate=self.dropout), Dense(features=classes))
        first, second, third = (self._stage(stage) for stage in "345")
        return (*stem, *first, HALVE, *second, MaxPool(kernel=2), *third, *head)

    def _stage(self, stage: str) -> list[LayerSpec]:
        return [
            Branches(scope=f"inception{name}", branches=self._branches(features))
            for name, features in _INCEPTIONS.items()
            if name.startswith(stage)
        ]

    def _branches(self, features: tuple[int, ...]) -> tuple[Stack, ...]:
        pointwise, first_inner, first, second_inner, second, pooled = features
        pool = MaxPool(kernel=3, stride=1, padding="same")
        return (
            self._conv(pointwise, 1),
            (*self._conv(first_inner, 1), *self._conv(first, 3)),
            (*self._conv(second_inner, 1), *self._conv(second, 3)),
            (pool, *self._conv(pooled, 1)),
        )

    def _conv(self, features: int, kernel: int, stride: int = 1) -> Stack:
        return _scaled_conv(self.width, features, kernel, stride)


def _scaled_conv(
    width: float, features: int, kernel: Size, stride: int = 1, padding: Padding = "same"
) -> Stack:
    features = max(1, round(features * width))
    return (*conv_norm(features, kernel, stride, padding=padding, epsilon=1e-3), Relu())


_HALVE = MaxPool(kernel=3, stride=2)
_BLUR = AvgPool(kernel=3, stride=1, padding="same")
_ROW = (1, 7)
_COLUMN = (7, 1)


@part("model")
class InceptionV3(LayeredModelSpec):
    """Eleven inception modules of five kinds, for images of 299x299.

    With 1000 classes it has 23,834,568 parameters.
    """

    name: Literal["inception_v3"] = "inception_v3"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        return (
            *self._stem(),
            *(self._square_module(f"square{i}", n) for i, n in enumerate((32, 64, 64))),
            self._first_reduction(),
            *(self._factored_module(f"factored{i}", n) for i, n in enumerate((128, 160, 160, 192))),
            self._second_reduction(),
            *(self._expanded_module(f"expanded{i}") for i in range(2)),
            GlobalAvgPool(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _conv(self, features: int, kernel: Size, stride: int = 1, valid: bool = False) -> Stack:
        padding: Literal["same", "valid"] = "valid" if valid else "same"
        return _scaled_conv(self.width, features, kernel, stride, padding)

    def _convs(self, *features_and_kernels: tuple[int, Size]) -> Stack:
        return tuple(
            layer
            for features, kernel in features_and_kernels
            for layer in self._conv(features, kernel)
        )

    def _stem(self) -> Stack:
        return (
            *self._conv(32, 3, 2, valid=True),
            *self._conv(32, 3, valid=True),
            *self._conv(64, 3),
            _HALVE,
            *self._conv(80, 1),
            *self._conv(192, 3, valid=True),
            _HALVE,
        )

    def _square_module(self, scope: str, pooled: int) -> Branches:
        branches = (
            self._conv(64, 1),
            self._convs((48, 1), (64, 5)),
            self._convs((64, 1), (96, 3), (96, 3)),
            (_BLUR, *self._conv(pooled, 1)),
        )
        return Branches(scope=scope, branches=branches)

    def _first_reduction(self) -> Branches:
        twice = (*self._convs((64, 1), (96, 3)), *self._conv(96, 3, 2, valid=True))
        branches = (self._conv(384, 3, 2, valid=True), twice, (_HALVE,))
        return Branches(scope="reduction0", branches=branches)

    def _factored_module(self, scope: str, inner: int) -> Branches:
        row = (inner, _ROW)
        column = (inner, _COLUMN)
        branches = (
            self._conv(192, 1),
            self._convs((inner, 1), row, (192, _COLUMN)),
            self._convs((inner, 1), column, row, column, (192, _ROW)),
            (_BLUR, *self._conv(192, 1)),
        )
        return Branches(scope=scope, branches=branches)

    def _second_reduction(self) -> Branches:
        once = (*self._conv(192, 1), *self._conv(320, 3, 2, valid=True))
        factored = self._convs((192, 1), (192, _ROW), (192, _COLUMN))
        branches = (once, (*factored, *self._conv(192, 3, 2, valid=True)), (_HALVE,))
        return Branches(scope="reduction1", branches=branches)

    def _expanded_module(self, scope: str) -> Branches:
        both = Branches(branches=(self._conv(384, (1, 3)), self._conv(384, (3, 1))))
        branches = (
            self._conv(320, 1),
            (*self._conv(384, 1), both),
            (*self._convs((448, 1), (384, 3)), both),
            (_BLUR, *self._conv(192, 1)),
        )
        return Branches(scope=scope, branches=branches)
