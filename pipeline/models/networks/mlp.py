"""The multilayer perceptron."""

from __future__ import annotations

from typing import Literal

from pydantic import PositiveInt

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Dense, Flatten, Relu


@part("model")
class MLP(LayeredModelSpec):
    """Dense layers of `hidden` features with ReLU between, on flattened images (M-04)."""

    name: Literal["mlp"] = "mlp"
    hidden: Seq[PositiveInt]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        hidden = (layer for features in self.hidden for layer in (Dense(features=features), Relu()))
        return (Flatten(), *hidden, Dense(features=classes))
