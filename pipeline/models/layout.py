"""The order of axes that a network computes its images in.

NHWC is what images come in and what every layer knows. CHWN has the batch innermost: vectors are
made of samples instead of channels, which is faster where channels are few. Height and width are
axes 1 and 2 in both, and parameters are the same, so that a checkpoint of one is one of the other.
"""

from __future__ import annotations

from typing import Literal

from jax import Array

from pipeline.models import layers
from pipeline.models.spec import LayerSpec

Layout = Literal["nhwc", "chwn"]

_KNOWN = (
    layers.Activation,
    layers.AvgPool,
    layers.BatchNorm,
    layers.Conv,
    layers.Dense,
    layers.Dropout,
    layers.Flatten,
    layers.GlobalAvgPool,
    layers.MaxPool,
)
"""The layers that can be computed in CHWN."""


def batch_last(images: Array) -> Array:
    """Images (batch, height, width, channels) as (channels, height, width, batch)."""
    return images.transpose(3, 1, 2, 0)


def batch_first(x: Array, layout: Layout) -> Array:
    """Images of a layout as (batch, height, width, channels); what is no image is given back."""
    return x.transpose(3, 1, 2, 0) if channel_axis(x, layout) == 0 else x


def channel_axis(x: Array, layout: Layout) -> int:
    """Which axis holds the channels, or the features of what is no image: 0 or -1."""
    return 0 if x.ndim == 4 and layout == "chwn" else -1


def shape_nhwc(x: Array, layout: Layout) -> tuple[int, ...]:
    """The shape of x; of images as (batch, height, width, channels) in any layout."""
    channels, *sizes, batch = x.shape
    return (batch, *sizes, channels) if channel_axis(x, layout) == 0 else x.shape


def first_without_batch_last(stack: tuple[LayerSpec, ...]) -> LayerSpec | None:
    """The first layer that can't be computed in CHWN, if there is one."""
    return next((layer for layer in stack if not _knows_batch_last(layer)), None)


def _knows_batch_last(layer: LayerSpec) -> bool:
    return isinstance(layer, _KNOWN) and getattr(layer, "groups", 1) == 1
