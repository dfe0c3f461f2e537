"""GoogLeNet with batch norm, as MindSpore's model zoo has it (Szegedy et al. 2015)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveFloat

from pipeline.core.registry import part
from pipeline.models.blocks.common_blocks import HALVE, Stack, conv_norm
from pipeline.models.blocks.padding_convention import StridedModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Branches, Dense, Dropout, GlobalAvgPool, MaxPool, Relu

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

    As in the zoo and in torchvision, the branch that is 5x5 in the paper is 3x3, and there are no
    auxiliary classifiers. With 1000 classes it has 6,624,904 parameters.
    """

    name: Literal["googlenet"] = "googlenet"
    width: PositiveFloat
    """Factor on the paper's features of every convolution."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def same_layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        stem = (*self._conv(64, 7, 2), HALVE, *self._conv(64, 1), *self._conv(192, 3), HALVE)
        return (
            *stem,
            *self._stage("3"),
            HALVE,
            *self._stage("4"),
            MaxPool(kernel=2),
            *self._stage("5"),
            GlobalAvgPool(),
            Dropout(rate=self.dropout),
            Dense(features=classes),
        )

    def _stage(self, stage: str) -> list[LayerSpec]:
        return [
            Branches(scope=f"inception{name}", branches=self._branches(features))
            for name, features in _INCEPTIONS.items()
            if name.startswith(stage)
        ]

    def _branches(self, features: tuple[int, ...]) -> tuple[Stack, ...]:
        one, before_first, first, before_second, second, pooled = features
        pool = MaxPool(kernel=3, stride=1, padding="same")
        return (
            self._conv(one, 1),
            (*self._conv(before_first, 1), *self._conv(first, 3)),
            (*self._conv(before_second, 1), *self._conv(second, 3)),
            (pool, *self._conv(pooled, 1)),
        )

    def _conv(self, features: int, kernel: int, stride: int = 1) -> Stack:
        scaled = max(1, round(features * self.width))
        return (*conv_norm(scaled, kernel, stride, epsilon=1e-3), Relu())
