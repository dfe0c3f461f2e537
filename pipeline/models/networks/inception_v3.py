"""Inception v3 (Szegedy et al. 2016, table 1), without its auxiliary classifier."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import Stack, conv_norm
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.fields import Size
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

_HALVE = MaxPool(kernel=3, stride=2)
_BLUR = AvgPool(kernel=3, stride=1, padding="same")
_ROW, _COLUMN = (1, 7), (7, 1)


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
            *(self._square(f"square{index}", pooled) for index, pooled in enumerate((32, 64, 64))),
            self._first_reduction(),
            *(
                self._factored(f"factored{index}", inner)
                for index, inner in enumerate((128, 160, 160, 192))
            ),
            self._second_reduction(),
            *(self._expanded(f"expanded{index}") for index in range(2)),
            GlobalAvgPool(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _conv(self, features: int, kernel: Size, stride: int = 1, valid: bool = False) -> Stack:
        scaled = max(1, round(features * self.width))
        padding: Literal["same", "valid"] = "valid" if valid else "same"
        return (*conv_norm(scaled, kernel, stride, padding=padding, epsilon=1e-3), Relu())

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

    def _square(self, scope: str, pooled: int) -> Branches:
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

    def _factored(self, scope: str, inner: int) -> Branches:
        twice = ((inner, _COLUMN), (inner, _ROW), (inner, _COLUMN), (192, _ROW))
        branches = (
            self._conv(192, 1),
            self._convs((inner, 1), (inner, _ROW), (192, _COLUMN)),
            self._convs((inner, 1), *twice),
            (_BLUR, *self._conv(192, 1)),
        )
        return Branches(scope=scope, branches=branches)

    def _second_reduction(self) -> Branches:
        once = (*self._conv(192, 1), *self._conv(320, 3, 2, valid=True))
        factored = self._convs((192, 1), (192, _ROW), (192, _COLUMN))
        branches = (once, (*factored, *self._conv(192, 3, 2, valid=True)), (_HALVE,))
        return Branches(scope="reduction1", branches=branches)

    def _expanded(self, scope: str) -> Branches:
        both = Branches(branches=(self._conv(384, (1, 3)), self._conv(384, (3, 1))))
        branches = (
            self._conv(320, 1),
            (*self._conv(384, 1), both),
            (*self._convs((448, 1), (384, 3)), both),
            (_BLUR, *self._conv(192, 1)),
        )
        return Branches(scope=scope, branches=branches)
