"""Pooling and resizing of images, in NHWC or CHWN, with height and width as axes 1 and 2.

Volumes (batch, channels, depth, height, width) are pooled in PyTorch's order.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import reduce
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.lowerings.formulas.adaptive_pools import (
    average_windows,
    max_windows,
    multiply_axis,
)
from pipeline.models.lowerings.max_pool import pool_max
from pipeline.models.lowerings.problem.conv_window import Pair
from pipeline.models.torch_graph.operator_table import OperatorContext, aten, pack_result, plain
from pipeline.models.torch_graph.operators.convolution_ops import as_pair, list_sizes
from pipeline.models.torch_graph.tensor import TorchTensor, choose_image_order, to_tensor

Sizes = int | Sequence[int]

MAX_SIDE = 1 << 16
"""Largest height or width of a resized image, in pixels."""


@dataclass(frozen=True)
class MaxPoolSettings:
    """Settings of max pooling, in ATen's order."""

    kernel_size: Sizes
    stride: Sizes = ()
    padding: Sizes = 0
    dilation: Sizes = 1
    ceil_mode: bool = False


@dataclass(frozen=True)
class AvgPoolSettings:
    """Settings of average pooling, in ATen's order."""

    kernel_size: Sizes
    stride: Sizes = ()
    padding: Sizes = 0
    ceil_mode: bool = False
    count_include_pad: bool = True
    divisor_override: int | None = None


@aten("max_pool2d.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool2d(context: OperatorContext, x: TorchTensor, settings: MaxPoolSettings) -> TorchTensor:
    """Return the largest value of every window, by the lowering that the policy chooses."""
    window = as_pair(settings.kernel_size)
    dilation = as_pair(settings.dilation)
    strides = as_pair(settings.stride or window)
    order = choose_image_order(x)
    images = x.transpose(order)
    rows, columns = _compute_pads(images.shape[1:3], window, dilation, settings)
    if dilation == (1, 1):
        y = pool_max(images, window, strides, (rows, columns), context.policy)
    else:
        y = lax.reduce_window(
            images,
            -jnp.inf,
            lax.max,
            window_dimensions=(1, *window, 1),
            window_strides=(1, *strides, 1),
            padding=((0, 0), rows, columns, (0, 0)),
            window_dilation=(1, *dilation, 1),
        )
    return TorchTensor(y, order)


aten("max_pool2d_with_indices.default", kind="max_pool", settings=MaxPoolSettings)(
    pack_result(max_pool2d)
)


@aten("max_pool3d.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool3d(x: TorchTensor, settings: MaxPoolSettings) -> TorchTensor:
    """Return the largest value of every window of volumes."""
    window = list_sizes(settings.kernel_size, 3)
    dilation = list_sizes(settings.dilation, 3)
    pads = _compute_pads(x.shape[2:], window, dilation, settings)
    y = lax.reduce_window(
        x.plain(),
        -jnp.inf,
        lax.max,
        (1, 1, *window),
        (1, 1, *list_sizes(settings.stride or window, 3)),
        ((0, 0), (0, 0), *pads),
        window_dilation=(1, 1, *dilation),
    )
    return to_tensor(y)


@aten("avg_pool2d.default", kind="avg_pool", settings=AvgPoolSettings)
def avg_pool2d(x: TorchTensor, settings: AvgPoolSettings) -> TorchTensor:
    """Return the mean of every window, by default with the zeros of the padding."""
    order = choose_image_order(x)
    return TorchTensor(_average(x.transpose(order), 1, 2, settings), order)


@aten("avg_pool3d.default", kind="avg_pool", settings=AvgPoolSettings)
def avg_pool3d(x: TorchTensor, settings: AvgPoolSettings) -> TorchTensor:
    """Return the mean of every window of volumes, by default with the zeros of the padding."""
    return to_tensor(_average(x.plain(), 2, 3, settings))


def _average(x: Array, first: int, num_axes: int, settings: AvgPoolSettings) -> Array:
    """Return means of windows over the spatial axes, of which `first` is the first."""
    window = list_sizes(settings.kernel_size, num_axes)
    strides = list_sizes(settings.stride or window, num_axes)
    padding = list_sizes(settings.padding if settings.count_include_pad else 0, num_axes)
    sizes = x.shape[first : first + num_axes]
    pads = _compute_pads(sizes, window, (1,) * num_axes, settings)

    def fill_axes(numbers: Sequence[Any], other: Any) -> tuple[Any, ...]:
        """Return a value for each axis of x: numbers for the spatial axes, else `other`."""
        return (other,) * first + tuple(numbers) + (other,) * (x.ndim - first - num_axes)

    # The initial value is a numpy array. With a JAX array the sum would have no gradient.
    total = lax.reduce_window(
        x,
        np.zeros((), x.dtype),
        lax.add,
        window_dimensions=fill_axes(window, 1),
        window_strides=fill_axes(strides, 1),
        padding=fill_axes(pads, (0, 0)),
    )
    if settings.divisor_override is not None:
        return total / settings.divisor_override
    num_rows = map(_count_rows, sizes, window, strides, pads, padding)
    divisor = np.asarray(reduce(np.multiply.outer, num_rows), np.float32)
    if (divisor == divisor.flat[0]).all():
        return total / np.asarray(divisor.flat[0], total.dtype)
    shape = fill_axes(divisor.shape, 1)[first:]
    return total / jnp.asarray(divisor.reshape(shape), total.dtype)


def _count_rows(size: int, window: int, stride: int, pads: Pair, padding: int) -> np.ndarray:
    """Return the number of rows over which the mean of each window is computed.

    These are rows of the image, and `padding` rows before and after it. Rows that `ceil_mode` adds
    aren't included.
    """
    num_windows = (size + sum(pads) - window) // stride + 1
    starts = np.arange(num_windows) * stride - pads[0]
    return np.minimum(starts + window, size + padding) - np.maximum(starts, -padding)


@aten("adaptive_avg_pool2d.default", "_adaptive_avg_pool2d.default")
def adaptive_avg_pool2d(x: TorchTensor, output_size: Sequence[int | None]) -> TorchTensor:
    """Return images of `output_size`, whose pixels are means of windows that cover the images."""
    sizes = zip(x.shape[2:], output_size, strict=True)
    targets = [size if target is None else target for size, target in sizes]
    return _resize(x, targets, average_windows)


@aten("adaptive_max_pool2d.default")
def adaptive_max_pool2d(
    context: OperatorContext, x: TorchTensor, output_size: Sequence[int]
) -> tuple[TorchTensor, ...]:
    """Return images of `output_size`, whose pixels are maxima of windows that cover the images."""
    height, width = x.shape[2:]
    rows, columns = output_size
    if height % rows == 0 and width % columns == 0:
        window = (height // rows, width // columns)
        return (max_pool2d(context, x, MaxPoolSettings(window)),)
    return (_resize(x, output_size, max_windows),)


def _resize(
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
        # PyTorch computes with float32 here.
        step = None if factor is None else np.float32(1 / factor)
        places = pixels * size // target if step is None else (pixels * step).astype(int)
        return jnp.take(images, np.minimum(places, size - 1), axis=axis)

    factors = _list_factors(scales, scale_width)
    return _resize(x, _choose_target_size(x, output_size, factors), take_nearest)


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
                step = (size - 1) / max(target - 1, 1)
            else:
                # A factor isn't rounded if size * factor isn't a whole number.
                factor = factors[axis - 1]
                step = size / target if factor is None else 1 / factor
            return multiply_axis(images, axis, weigh(Resampling(size, target, step, align_corners)))

        factors = _list_factors(scales, scale_width)
        return _resize(x, _choose_target_size(x, output_size, factors), interpolate)


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
        pixel_weights = _weigh_cubic(positions - pixels, -0.75)
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


def _weigh_cubic(distance: np.ndarray, a: float) -> np.ndarray:
    """Return the cubic convolution kernel of Keys (1981), eq. 4, with the slope a at 1."""
    d = np.abs(distance)
    near = ((a + 2) * d - (a + 3)) * d**2 + 1
    far = a * (((d - 5) * d + 8) * d - 4)
    return np.where(d <= 1, near, np.where(d < 2, far, 0))


_register_resize("upsample_bilinear2d", _weigh_bilinear)
_register_resize("upsample_bicubic2d", _weigh_bicubic)
_register_resize("_upsample_bilinear2d_aa", _widen(1, lambda d: np.maximum(1 - np.abs(d), 0)))
_register_resize("_upsample_bicubic2d_aa", _widen(2, lambda d: _weigh_cubic(d, -0.5)))


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


def _compute_pads(
    sizes: Sequence[int],
    window: Sequence[int],
    dilation: Sequence[int],
    settings: MaxPoolSettings | AvgPoolSettings,
) -> tuple[Pair, ...]:
    """Return the pads (before, after) of each spatial axis.

    With `ceil_mode`, a last window may reach beyond the padding after the image, if it starts
    before that padding.
    """
    strides = list_sizes(settings.stride or window, len(window))
    padding = list_sizes(settings.padding, len(window))
    pads = []
    for size, taps, step, pad, gap in zip(sizes, window, strides, padding, dilation, strict=True):
        # Start of the last possible window, in pixels from the start of the padding.
        last_start = size + 2 * pad - (taps - 1) * gap - 1
        if last_start < 0:
            raise ValueError(f"a window of {window} does not fit into images {tuple(sizes)}")
        extra = -last_start % step if settings.ceil_mode else 0
        if last_start + extra >= size + pad:
            extra = 0
        pads.append((pad, pad + extra))
    return tuple(pads)


@aten("pixel_unshuffle.default")
@plain
def pixel_unshuffle(x: Array, factor: int) -> Array:
    """Move the pixels of each factor x factor square to channels."""
    batch, channels, height, width = x.shape
    parts = x.reshape(batch, channels, height // factor, factor, width // factor, factor)
    moved = parts.transpose(0, 1, 3, 5, 2, 4)
    return moved.reshape(batch, channels * factor**2, height // factor, width // factor)
