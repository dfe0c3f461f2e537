"""Layouts of images, which are orders of their axes."""

from __future__ import annotations

from typing import Literal

from jax import Array

Layout = Literal["nhwc", "chwn"]


def swap_layout(images: Array) -> Array:
    """Transpose images from NHWC to CHWN, or back."""
    return images.transpose(3, 1, 2, 0)
