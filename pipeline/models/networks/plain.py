"""Networks without branches: the multilayer perceptron, LeNet-5, AlexNet and VGG."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import Count, LayerSpec
from pipeline.models.layers.standard import BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu


@component("model")
class MLP(LayeredModelSpec):
    """Dense layers of `hidden` features, each before a ReLU, on flattened images."""

    name: Literal["mlp"] = "mlp"
    hidden: Seq[PositiveInt]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        hidden = (layer for features in self.hidden for layer in (Dense(features=features), Relu()))
        return (Flatten(), *hidden, Dense(features=classes))


@component("model")
class LeNet5(LayeredModelSpec):
    """Two 5x5 convolutions without bias and three dense layers, for images of 32x32.

    As in MindSpore's tutorials. With one channel and 10 classes it has 61,684 parameters.
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


@component("model")
class AlexNet(LayeredModelSpec):
    """Five convolutions with bias and three dense layers (Krizhevsky et al. 2012, one tower).

    Images are 224x224 to 227x227. The features are from MindSpore's model zoo: with 10 classes it
    has 56,057,418 parameters.
    """

    name: Literal["alexnet"] = "alexnet"
    hidden: PositiveInt
    """Features of the two hidden dense layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        pool = MaxPool(kernel=3, stride=2)
        layers: list[LayerSpec] = [Conv(features=64, kernel=11, stride=4, bias=True), Relu(), pool]
        layers += (Conv(features=128, kernel=5, bias=True), Relu(), pool)
        for features in (192, 256, 256):
            layers += (Conv(features=features, kernel=3, bias=True), Relu())
        hidden = (Dense(features=self.hidden), Relu(), Dropout(rate=self.dropout))
        return (*layers, pool, Flatten(), *hidden, *hidden, Dense(features=classes))


@component("model")
class VGG(LayeredModelSpec):
    """Stages of 3x3 convolutions with bias, each before a max pool, and three dense layers.

    Simonyan and Zisserman 2015.
    """

    stage_fields: ClassVar[tuple[str, ...]] = ("convs", "widths")
    name: Literal["vgg"] = "vgg"
    convs: Seq[Count]
    """Number of convolutions of each stage."""
    widths: Seq[PositiveInt]
    """Features of the convolutions, by stage."""
    batch_norm: bool
    """Whether batch norm follows every convolution; not in the paper."""
    hidden: PositiveInt
    """Features of the two hidden dense layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        norm = (BatchNorm(),) if self.batch_norm else ()
        layers: list[LayerSpec] = []
        for count, width in zip(self.convs, self.widths, strict=True):
            conv = Conv(features=width, kernel=3, bias=True)
            layers += ((conv, *norm, Relu()) * count) + (MaxPool(kernel=2),)
        hidden = (Dense(features=self.hidden), Relu(), Dropout(rate=self.dropout))
        return (*layers, Flatten(), *hidden, *hidden, Dense(features=classes))
