"""Resizing of images, in NHWC or CHWN, and sampling at positions that a network computes.

Height and width are axes 1 and 2. Volumes are sampled, too.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TypeVar

import jax.numpy as jnp
import numpy as np
from jax import Array

from pipeline.models.lowerings.formulas.pools import multiply_axis
from pipeline.models.torch_graph.operator_table import (
    TorchTensor,
    aten,
    choose_image_order,
    to_tensor,
)

MAX_SIDE = 1 << 16
"""Largest height or width of a resized image, in pixels."""
BILINEAR, NEAREST, BICUBIC = range(3)
ZEROS, BORDER, REFLECTION = range(3)
"""PyTorch's numbers of interpolations and of paddings."""
_CUBIC = -0.75
"""Slope of the cubic kernel at 1, as in Keys (1981)."""


def resize_images(
    x: TorchTensor, targets: Sequence[int], resize: Callable[[Array, int, int], Array]
) -> TorchTensor:
    """Resize images by a function of an array, an axis and its new size."""
    order = choose_image_order(x)
    images = x.transpose(order)
    for axis, target in zip((1, 2), targets, strict=True):
        if not 1 <= target <= MAX_SIDE:
            raise ValueError(f"a height or width of {target}; must be 1 to {MAX_SIDE:,}")
        images = resize(images, axis, target)
    return TorchTensor(images, order)


@dataclass(frozen=True)
class Resampling:
    """An axis of `size` pixels that is resized to `target` pixels."""

    size: int
    target: int
    step: float
    """Distance of two new pixels, in old pixels."""
    align_corners: bool = False
    """Whether the centres of the first and last pixels stay where they are, instead of the edges of
    the image."""

    def find_positions(self) -> np.ndarray:
        """Return the positions of the new pixels on the old axis, float64 (target,)."""
        pixels = np.arange(self.target)
        return pixels * self.step if self.align_corners else (pixels + 0.5) * self.step - 0.5


Distance = TypeVar("Distance", np.ndarray, Array)
Weigh = Callable[[Resampling], np.ndarray]
"""Returns a matrix (target, size), float32, with the weights of the old pixels."""


@aten("upsample_nearest2d.vec", "upsample_nearest2d.default")
def upsample_nearest2d(
    x: TorchTensor,
    output_size: Sequence[int] | None = None,
    scales: object = None,
    scale_width: float | None = None,
) -> TorchTensor:
    """Resize images by the nearest pixel."""

    def take_nearest(images: Array, axis: int, target: int) -> Array:
        size = images.shape[axis]
        factor = factors[axis - 1]
        pixels = np.arange(target)
        if target in (size, 2 * size):
            # PyTorch doesn't read the factor here.
            places = pixels * size // target
        else:
            # PyTorch computes with float32 here.
            step = np.float32(size) / np.float32(target) if factor is None else 1 / factor
            places = (pixels.astype(np.float32) * np.float32(step)).astype(int)
        return jnp.take(images, np.minimum(places, size - 1), axis=axis)

    factors = _list_factors(scales, scale_width)
    return resize_images(x, _choose_target_size(x, output_size, factors), take_nearest)


def _register_resize(name: str, weigh: Weigh) -> None:
    """Register a resize that multiplies height and width by matrices."""

    @aten(f"{name}.vec", f"{name}.default")
    def resize(
        x: TorchTensor,
        output_size: Sequence[int] | None,
        align_corners: bool,
        scales: object = None,
        scale_width: float | None = None,
    ) -> TorchTensor:
        def interpolate(images: Array, axis: int, target: int) -> Array:
            size = images.shape[axis]
            if align_corners:
                step = (size - 1) / (target - 1) if target > 1 else 0.0
            else:
                # A factor isn't rounded if size * factor isn't a whole number.
                factor = factors[axis - 1]
                step = size / target if factor is None else 1 / factor
            return multiply_axis(images, axis, weigh(Resampling(size, target, step, align_corners)))

        factors = _list_factors(scales, scale_width)
        return resize_images(x, _choose_target_size(x, output_size, factors), interpolate)


def _weigh_bilinear(axis: Resampling) -> np.ndarray:
    positions = np.maximum(axis.find_positions(), 0)
    low = np.minimum(positions.astype(int), axis.size - 1)
    rows = np.arange(axis.target)
    weights = np.zeros((axis.target, axis.size), np.float32)
    weights[rows, low] += 1 - (positions - low)
    weights[rows, np.minimum(low + 1, axis.size - 1)] += positions - low
    return weights


def _weigh_bicubic(axis: Resampling) -> np.ndarray:
    """Return the weights of the four nearest pixels (Keys 1981, a = -0.75)."""
    positions = axis.find_positions()
    weights = np.zeros((axis.target, axis.size), np.float32)
    for offset in (-1, 0, 1, 2):
        pixels = np.floor(positions).astype(int) + offset
        columns = np.clip(pixels, 0, axis.size - 1)
        pixel_weights = _weigh_cubic(np.abs(positions - pixels), _CUBIC)
        np.add.at(weights, (np.arange(axis.target), columns), pixel_weights)
    return weights


def _widen(reach: int, kernel: Callable[[np.ndarray], np.ndarray]) -> Weigh:
    """Return a function that weighs pixels by a kernel, which is 0 outside of [-reach, reach].

    If images become smaller, the kernel is widened by the factor.
    """

    def weigh(axis: Resampling) -> np.ndarray:
        width = max(axis.step, 1.0)
        centres = axis.step * (np.arange(axis.target) + 0.5)[:, None]
        pixels = np.arange(axis.size)
        first = np.maximum((centres - reach * width + 0.5).astype(int), 0)
        end = np.minimum((centres + reach * width + 0.5).astype(int), axis.size)
        weights = kernel((pixels - centres + 0.5) / width)
        weights = np.where((pixels >= first) & (pixels < end), weights, 0)
        return (weights / weights.sum(1, keepdims=True)).astype(np.float32)

    return weigh


def _weigh_cubic(d: Distance, a: float) -> Distance:
    """Return the cubic convolution kernel of Keys (1981), eq. 4, with the slope a at 1, for
    distances `d` from 0."""
    near = ((a + 2) * d - (a + 3)) * d**2 + 1
    far = a * (((d - 5) * d + 8) * d - 4)
    return near * (d <= 1) + far * ((d > 1) & (d < 2))


_register_resize("upsample_bilinear2d", _weigh_bilinear)
_register_resize("upsample_bicubic2d", _weigh_bicubic)
_register_resize("_upsample_bilinear2d_aa", _widen(1, lambda d: np.maximum(1 - np.abs(d), 0)))
_register_resize("_upsample_bicubic2d_aa", _widen(2, lambda d: _weigh_cubic(np.abs(d), -0.5)))


def _list_factors(scales: object, scale_width: float | None) -> Sequence[float | None]:
    """Return the factors of height and width: `scales` is a list of both, or the height's."""
    if scales is None or isinstance(scales, int | float):
        return scales, scale_width
    if isinstance(scales, Sequence) and len(scales) == 2:
        return scales
    raise ValueError("must have two factors to resize by")


def _choose_target_size(
    x: TorchTensor, output_size: Sequence[int] | None, factors: Sequence[float | None]
) -> Sequence[int]:
    if output_size is not None:
        return output_size
    sizes = zip(x.shape[2:], factors, strict=True)
    targets = [int(size * factor) for size, factor in sizes if factor is not None]
    if len(targets) != 2:
        raise ValueError("must have a size or two factors to resize by")
    return targets


@aten("grid_sampler.default", "grid_sampler_2d.default", "grid_sampler_3d.default")
def sample_grid(
    x: TorchTensor, grid: TorchTensor, interpolation: int, padding: int, align_corners: bool
) -> TorchTensor:
    """Sample images (batch, channels, height, width) at positions (batch, ..., 2), or volumes
    (batch, channels, depth, height, width) at positions (batch, ..., 3).

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
    return [(low + step, _weigh_cubic(jnp.abs(part - step), _CUBIC)) for step in (-1, 0, 1, 2)]


def _read(pixels: Array, places: Sequence[Array]) -> Array:
    """Return pixels (batch, ..., channels) at places, float32."""
    batch = jnp.arange(pixels.shape[0]).reshape(-1, *[1] * (places[0].ndim - 1))
    return pixels[(batch, *places)].astype(jnp.float32)
