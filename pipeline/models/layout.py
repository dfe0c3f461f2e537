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

CHANNEL_AXIS: dict[Layout, int] = {"nhwc": 3, "chwn": 0}

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


def batch_first(images: Array, layout: Layout) -> Array:
    """Images of a layout as (batch, height, width, channels)."""
    return images if layout == "nhwc" else images.transpose(3, 1, 2, 0)


def shape_nhwc(images: Array, layout: Layout) -> tuple[int, ...]:
    """Batch, height, width and channels of images of a layout."""
    shape = images.shape
    return shape if layout == "nhwc" else (shape[3], *shape[1:3], shape[0])


def first_without_batch_last(stack: tuple[LayerSpec, ...]) -> LayerSpec | None:
    """The first layer that can't be computed in CHWN, if there is one."""
    return next((layer for layer in stack if not _knows_batch_last(layer)), None)


def _knows_batch_last(layer: LayerSpec) -> bool:
    return isinstance(layer, _KNOWN) and getattr(layer, "groups", 1) == 1
