"""AlexNet as MindSpore's model zoo has it (official/cv/Alexnet)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import part
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Conv, Dense, Dropout, Flatten, MaxPool, Relu


@part("model")
class AlexNet(LayeredModelSpec):
    """Five convolutions with bias and three dense layers (Krizhevsky et al. 2012, one tower).

    For images of 224x224 to 227x227. The features are the zoo's: with 10 classes it has
    56,057,418 parameters.
    """

    name: Literal["alexnet"] = "alexnet"
    hidden: PositiveInt
    """Features of the two hidden dense layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        pool = MaxPool(kernel=3, stride=2)
        return (
            Conv(features=64, kernel=11, stride=4, bias=True),
            Relu(),
            pool,
            Conv(features=128, kernel=5, bias=True),
            Relu(),
            pool,
            *self._conv(192),
            *self._conv(256),
            *self._conv(256),
            pool,
            Flatten(),
            *self._hidden(),
            *self._hidden(),
            Dense(features=classes),
        )

    def _conv(self, features: int) -> tuple[LayerSpec, ...]:
        return Conv(features=features, kernel=3, bias=True), Relu()

    def _hidden(self) -> tuple[LayerSpec, ...]:
        return Dense(features=self.hidden), Relu(), Dropout(rate=self.dropout)
