"""Pooling of images, in NHWC or CHWN, with height and width as axes 1 and 2.

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

from pipeline.models.lowerings.formulas.pools import (
    average_windows,
    compute_wide,
    max_windows,
)
from pipeline.models.lowerings.lowered_layers import pool_max
from pipeline.models.lowerings.problem import Pair
from pipeline.models.torch_graph.operator_table import (
    NHWC,
    OperatorContext,
    TorchTensor,
    aten,
    choose_image_order,
    plain,
    to_tensor,
)
from pipeline.models.torch_graph.operators.convolution_ops import as_pair, list_sizes
from pipeline.models.torch_graph.operators.resize_ops import resize_images

Sizes = int | Sequence[int]


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
        return _take_maxima(x, _find_maxima(x, 2, settings))
    return TorchTensor(y, order)


@aten("max_pool2d_with_indices.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool2d_with_indices(
    context: OperatorContext, x: TorchTensor, settings: MaxPoolSettings
) -> tuple[TorchTensor, TorchTensor]:
    """Return the largest value of every window, and its index among the pixels."""
    return max_pool2d(context, x, settings), _find_maxima(x, 2, settings)


def _find_maxima(x: TorchTensor, num_axes: int, settings: MaxPoolSettings) -> TorchTensor:
    """Return the index of the largest value of every window, among all positions, int32.

    XLA removes this computation if nothing reads the indices.
    """
    array = lax.stop_gradient(x.plain())
    sizes = array.shape[2:]
    window = list_sizes(settings.kernel_size, num_axes)
    dilation = list_sizes(settings.dilation, num_axes)
    numbers = jnp.arange(np.prod(sizes), dtype=jnp.int32).reshape(sizes)

    def choose(first: tuple[Array, Array], second: tuple[Array, Array]) -> tuple[Array, Array]:
        is_first = (first[0] > second[0]) | ((first[0] == second[0]) & (first[1] < second[1]))
        pairs = zip(first, second, strict=True)
        value, index = (jnp.where(is_first, own, other) for own, other in pairs)
        return value, index

    lowest = (np.array(-np.inf, array.dtype), np.array(np.iinfo(np.int32).max, np.int32))
    _, indices = lax.reduce_window(
        (array, jnp.broadcast_to(numbers, array.shape)),
        lowest,
        choose,
        (1, 1, *window),
        (1, 1, *list_sizes(settings.stride or window, num_axes)),
        ((0, 0), (0, 0), *_compute_pads(sizes, window, dilation, settings)),
        window_dilation=(1, 1, *dilation),
    )
    return to_tensor(indices)


def _take_maxima(x: TorchTensor, indices: TorchTensor) -> TorchTensor:
    """Return the values at indices among all positions.

    XLA has no gradient of the maxima of windows with gaps.
    """
    flat = x.plain().reshape((*x.shape[:2], -1))
    places = indices.array.reshape((*x.shape[:2], -1))
    return to_tensor(jnp.take_along_axis(flat, places, 2).reshape(indices.shape))


@aten("max_pool1d.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool1d(context: OperatorContext, x: TorchTensor, settings: MaxPoolSettings) -> TorchTensor:
    """Return the largest value of every window of sequences, as images of height 1."""
    if x.ndim == 2:
        row = max_pool1d(context, to_tensor(x.plain()[None]), settings)
        return to_tensor(row.plain()[0])
    (kernel,) = list_sizes(settings.kernel_size, 1)
    (stride,) = list_sizes(settings.stride or kernel, 1)
    (padding,) = list_sizes(settings.padding, 1)
    (dilation,) = list_sizes(settings.dilation, 1)
    row_settings = MaxPoolSettings(
        (1, kernel), (1, stride), (0, padding), (1, dilation), settings.ceil_mode
    )
    image = TorchTensor(jnp.moveaxis(x.plain(), 1, -1)[:, None], NHWC)
    return TorchTensor(max_pool2d(context, image, row_settings).transpose(NHWC)[:, 0], (0, 2, 1))


@aten("max_pool1d_with_indices.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool1d_with_indices(
    context: OperatorContext, x: TorchTensor, settings: MaxPoolSettings
) -> tuple[TorchTensor, TorchTensor]:
    """Return the largest value of every window of sequences, and its index."""
    return max_pool1d(context, x, settings), _find_maxima(x, 1, settings)


@aten("max_pool3d.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool3d(x: TorchTensor, settings: MaxPoolSettings) -> TorchTensor:
    """Return the largest value of every window of volumes."""
    window = list_sizes(settings.kernel_size, 3)
    dilation = list_sizes(settings.dilation, 3)
    if dilation != (1, 1, 1):
        return _take_maxima(x, _find_maxima(x, 3, settings))
    pads = _compute_pads(x.shape[2:], window, dilation, settings)
    y = lax.reduce_window(
        x.plain(),
        -jnp.inf,
        lax.max,
        (1, 1, *window),
        (1, 1, *list_sizes(settings.stride or window, 3)),
        ((0, 0), (0, 0), *pads),
    )
    return to_tensor(y)


@aten("max_pool3d_with_indices.default", kind="max_pool", settings=MaxPoolSettings)
def max_pool3d_with_indices(
    x: TorchTensor, settings: MaxPoolSettings
) -> tuple[TorchTensor, TorchTensor]:
    """Return the largest value of every window of volumes, and its index among the voxels."""
    return max_pool3d(x, settings), _find_maxima(x, 3, settings)


@aten("avg_pool1d.default", kind="avg_pool", settings=AvgPoolSettings)
def avg_pool1d(x: TorchTensor, settings: AvgPoolSettings) -> TorchTensor:
    """Return the mean of every window of sequences, by default with the zeros of the padding."""
    return to_tensor(_average(x.plain(), 2, 1, settings))


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

    if settings.divisor_override is None:
        num_rows = map(_count_rows, sizes, window, strides, pads, padding)
        counts = np.asarray(reduce(np.multiply.outer, num_rows), np.float32)
        shape = () if (counts == counts.flat[0]).all() else fill_axes(counts.shape, 1)[first:]
        divisor = counts.reshape(shape) if shape else counts.flat[:1].reshape(())
    else:
        divisor = np.full((), settings.divisor_override, np.float32)

    def compute(x: Array) -> Array:
        # The initial value is a numpy array. With a JAX array the sum would have no gradient.
        total = lax.reduce_window(
            x,
            np.zeros((), x.dtype),
            lax.add,
            window_dimensions=fill_axes(window, 1),
            window_strides=fill_axes(strides, 1),
            padding=fill_axes(pads, (0, 0)),
        )
        return total / jnp.asarray(divisor, total.dtype)

    return compute_wide(compute, x)


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
    return resize_images(x, targets, average_windows)


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
    return (resize_images(x, output_size, max_windows),)


@aten("adaptive_avg_pool1d.default", "adaptive_avg_pool3d.default", "_adaptive_avg_pool3d.default")
def adaptive_avg_pool(x: TorchTensor, output_size: Sequence[int | None]) -> TorchTensor:
    """Return sequences or volumes of `output_size`, each value the mean of a window."""
    return _pool_adaptively(x, output_size, average_windows)


@aten("adaptive_max_pool1d.default", "adaptive_max_pool3d.default")
def adaptive_max_pool(x: TorchTensor, output_size: Sequence[int]) -> tuple[TorchTensor]:
    """Return sequences or volumes of `output_size`, each value the maximum of a window.

    The operator's second result, the indices, isn't returned.
    """
    return (_pool_adaptively(x, output_size, max_windows),)


def _pool_adaptively(
    x: TorchTensor,
    output_size: int | Sequence[int | None],
    pool: Callable[[Array, int, int], Array],
) -> TorchTensor:
    """Pool the last axes to sizes, of which None is the old size."""
    targets = (output_size,) if isinstance(output_size, int) else output_size
    array = x.plain()
    for axis, target in zip(range(x.ndim - len(targets), x.ndim), targets, strict=True):
        array = array if target is None else pool(array, axis, target)
    return to_tensor(array)


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
