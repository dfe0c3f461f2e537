"""Layouts of images, which are orders of their axes."""

from __future__ import annotations

from typing import Literal

from jax import Array

Layout = Literal["nhwc", "chwn"]


def batch_last(images: Array) -> Array:
    """Return images (batch, height, width, channels) as (channels, height, width, batch).

    The transpose is its own inverse: images in CHWN are returned in NHWC.
    """
    return images.transpose(3, 1, 2, 0)
