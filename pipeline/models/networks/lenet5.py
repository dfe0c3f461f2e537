"""LeNet-5 as MindSpore's tutorials have it (M-02)."""

from __future__ import annotations

from typing import Literal

from pipeline.core.registry import part
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Conv, Dense, Flatten, MaxPool, Relu


@part("model")
class LeNet5(LayeredModelSpec):
    """Two 5x5 convolutions without bias and three dense layers, for images of 32x32 (M-02).

    On one channel and with 10 classes it has 61,684 parameters.
    """

    name: Literal["lenet5"] = "lenet5"

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        return (
            Conv(features=6, kernel=5, padding="valid"),
            Relu(),
            MaxPool(kernel=2),
            Conv(features=16, kernel=5, padding="valid"),
            Relu(),
            MaxPool(kernel=2),
            Flatten(),
            Dense(features=120),
            Relu(),
            Dense(features=84),
            Relu(),
            Dense(features=classes),
        )
