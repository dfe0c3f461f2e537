"""Layouts: orders of axes that images are computed in."""

from __future__ import annotations

from typing import Literal

from jax import Array

Layout = Literal["nhwc", "chwn"]


def batch_last(images: Array) -> Array:
    """Return images (batch, height, width, channels) as (channels, height, width, batch).

    Images in CHWN are returned in NHWC: the transpose is its inverse.
    """
    return images.transpose(3, 1, 2, 0)
