"""U-Net: an encoder and a decoder with skips between them (Ronneberger et al. 2015)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import Seq, part
from pipeline.models.blocks.common_blocks import Stack, conv_norm
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.standard import Branches, Conv, ConvTranspose, MaxPool, Relu


@part("model")
class UNet(LayeredModelSpec):
    """Classes of every pixel: logits (batch, height, width, classes).

    Each depth has two 3x3 convolutions, concatenates their output at its end, and pools it for the
    depth below. Convolutions don't lose a border, as the paper's do. The sides of an image are
    multiples of 2 ** (number of depths - 1).
    """

    name: Literal["unet"] = "unet"
    widths: Annotated[Seq[PositiveInt], Field(min_length=2)]
    """Features of the convolutions, depth by depth."""
    batch_norm: bool
    """Normalise after every 3x3 convolution, instead of a bias; the paper does not."""

    def layers_for(self, classes: int) -> Stack:
        return (*self._depth(0), Conv(features=classes, kernel=1, bias=True))

    def _depth(self, depth: int) -> Stack:
        """Return the layers from this depth down and up again, to the same size of the image."""
        convs = self._convs(self.widths[depth])
        if depth == len(self.widths) - 1:
            return convs
        up = ConvTranspose(features=self.widths[depth], kernel=2, stride=2, bias=True)
        below = (MaxPool(kernel=2), *self._depth(depth + 1), up)
        return (*convs, Branches(scope=f"below{depth}", branches=((), below)), *convs)

    def _convs(self, features: int) -> Stack:
        once: Stack = (Conv(features=features, kernel=3, bias=True),)
        if self.batch_norm:
            once = conv_norm(features, 3)
        return (*once, Relu()) * 2
