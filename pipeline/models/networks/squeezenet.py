"""SqueezeNet and its variant with bypasses (Iandola et al. 2016)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import residual_if
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import Branches, Conv, Dropout, GlobalAvgPool, MaxPool, Relu


@part("model")
class SqueezeNet(LayeredModelSpec):
    """Fire modules: a 1x1 convolution squeezes, a 1x1 and a 3x3 side by side expand.

    Each side of the expansion has four times the squeezed features. For images of 224x224 to
    227x227; poolings keep no partial window, as in MindSpore's model zoo.
    """

    name: Literal["squeezenet"] = "squeezenet"
    stem_features: PositiveInt
    stem_kernel: PositiveInt
    squeezes: Seq[PositiveInt]
    """Features that each fire module squeezes to."""
    pool_after: Seq[PositiveInt]
    """The fire modules, counted from 1, that a max pool follows; one follows the stem, too."""
    bypass: bool
    """Add its input to every fire module with the same number of channels (fig. 2, middle)."""
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
            keeps = self.bypass and channels == 8 * squeeze
            layers.append(residual_if(keeps, f"fire{number + 1}", _fire(squeeze)))
            layers += [pool] if number in self.pool_after else []
            channels = 8 * squeeze
        last = Conv(features=classes, kernel=1, bias=True)
        return (*layers, Dropout(rate=self.dropout), last, Relu(), GlobalAvgPool())


def _fire(squeeze: int) -> tuple[LayerSpec, ...]:
    sides = tuple(
        (Conv(features=4 * squeeze, kernel=kernel, bias=True), Relu()) for kernel in (1, 3)
    )
    return Conv(features=squeeze, kernel=1, bias=True), Relu(), Branches(branches=sides)
