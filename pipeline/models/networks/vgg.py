"""The networks of 3x3 convolutions of Simonyan and Zisserman (2015)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.blocks.residual_stages import check_stages
from pipeline.models.layers.fields import Count
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import BatchNorm, Conv, Dense, Dropout, Flatten, MaxPool, Relu


@part("model")
class VGG(LayeredModelSpec):
    """Stages of 3x3 convolutions with bias, each halved by a max pool, and three dense layers."""

    name: Literal["vgg"] = "vgg"
    convs: Seq[Count]
    """Number of convolutions of each stage."""
    widths: Seq[PositiveInt]
    """Features of the convolutions, stage by stage."""
    batch_norm: bool
    """Normalise after every convolution, which the paper does not."""
    hidden: PositiveInt
    """Features of the two hidden dense layers."""
    dropout: Annotated[float, Field(ge=0, lt=1)]

    @model_validator(mode="after")
    def _one_width_per_stage(self) -> Self:
        check_stages(convs=self.convs, widths=self.widths)
        return self

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        hidden = (Dense(features=self.hidden), Relu(), Dropout(rate=self.dropout))
        return (*self._stages(), Flatten(), *hidden, *hidden, Dense(features=classes))

    def _stages(self) -> list[LayerSpec]:
        norm = (BatchNorm(),) if self.batch_norm else ()
        layers: list[LayerSpec] = []
        for count, width in zip(self.convs, self.widths, strict=True):
            conv = Conv(features=width, kernel=3, bias=True)
            layers += ((conv, *norm, Relu()) * count) + (MaxPool(kernel=2),)
        return layers
