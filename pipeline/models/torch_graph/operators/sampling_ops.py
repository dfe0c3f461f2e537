"""Sampling of images and volumes at positions that a network computes."""

from __future__ import annotations

import itertools
from collections.abc import Sequence

import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.operator_table import aten
from pipeline.models.torch_graph.tensor import TorchTensor, to_tensor

BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
"""PyTorch's numbers of interpolations and of paddings."""
_CUBIC = -0.75
"""Slope of the cubic kernel at 1, as in Keys (1981)."""


@aten("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default")
def sample_grid(
    x: TorchTensor, grid: TorchTensor, interpolation: int, padding: int, align_corners: bool
) -> TorchTensor:
    """Sample images (batch, channels, ..., height, width) at positions (batch, ..., 2).

    The last axis of the grid is x, y and, for volumes, z, from -1 to 1 over the image.
    """
    pixels = jnp.moveaxis(x.plain(), 1, -1)
    sizes = pixels.shape[1:-1]
    positions = [
        _to_pixels(grid.plain()[..., -1 - axis].astype(jnp.float32), size, align_corners)
        for axis, size in enumerate(sizes)
    ]
    if interpolation != BICUBIC:
        positions = [
            _fold(position, size, padding, align_corners)
            for position, size in zip(positions, sizes, strict=True)
        ]
    taps = [_list_taps(position, interpolation) for position in positions]
    total = jnp.zeros((), jnp.float32)
    for corner in itertools.product(*taps):
        weight = jnp.ones((), jnp.float32)
        places = []
        for (place, axis_weight), size in zip(corner, sizes, strict=True):
            if interpolation == BICUBIC:
                place = _fold(place, size, padding, align_corners)
            is_inside = (place >= 0) & (place <= size - 1)
            weight = weight * jnp.where(is_inside, axis_weight, 0)
            places.append(jnp.clip(place, 0, size - 1).astype(jnp.int32))
        total = total + weight[..., None] * _read(pixels, places)
    return to_tensor(jnp.moveaxis(total.astype(x.dtype), -1, 1))


def _to_pixels(position: Array, size: int, align_corners: bool) -> Array:
    if align_corners:
        return (position + 1) / 2 * (size - 1)
    return ((position + 1) * size - 1) / 2


def _fold(position: Array, size: int, padding: int, align_corners: bool) -> Array:
    """Return positions inside of the image for the paddings border and reflection."""
    if padding == ZEROS:
        return position
    if padding == REFLECTION:
        low, span = (0.0, float(size - 1)) if align_corners else (-0.5, float(size))
        if span == 0:
            return jnp.zeros_like(position)
        distance = jnp.abs(position - low)
        turns = jnp.floor(distance / span)
        rest = distance - turns * span
        position = jnp.where(turns % 2 == 0, rest, span - rest) + low
    return jnp.clip(position, 0, size - 1)


def _list_taps(position: Array, interpolation: int) -> list[tuple[Array, Array]]:
    """Return the pixels that are read on an axis, and their weights."""
    if interpolation == NEAREST:
        return [(jnp.round(position), jnp.ones_like(position))]
    low = jnp.floor(position)
    part = position - low
    if interpolation == BILINEAR:
        return [(low, 1 - part), (low + 1, part)]
    if interpolation != BICUBIC:
        raise ValueError(f"interpolation {interpolation}; must be 0, 1 or 2")
    return [(low + step, _weigh(jnp.abs(part - step))) for step in (-1, 0, 1, 2)]


def _weigh(distance: Array) -> Array:
    near = ((_CUBIC + 2) * distance - (_CUBIC + 3)) * distance**2 + 1
    far = _CUBIC * (((distance - 5) * distance + 8) * distance - 4)
    return jnp.where(distance <= 1, near, far)


def _read(pixels: Array, places: Sequence[Array]) -> Array:
    """Return pixels (batch, ..., channels) at places, float32."""
    batch = jnp.arange(pixels.shape[0]).reshape(-1, *[1] * (places[0].ndim - 1))
    return pixels[(batch, *places)].astype(jnp.float32)
