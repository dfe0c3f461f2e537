"""Operators that reshape, move, slice, join, repeat and pad axes."""

from __future__ import annotations

import itertools
import math
import sys
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pipeline.models.torch_graph.operator_table import (
    TorchTensor,
    aten,
    cast_array,
    count_values,
    drop_axes,
    permute_axes,
    plain,
    reshape_axes,
    to_tensor,
)

Sizes = Sequence[int]

MAX_PIECES = 4096
"""Most pieces of a tensor, since tracing each piece takes time."""


@aten("view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default")
def view(x: TorchTensor, shape: Sizes, *_: Any) -> TorchTensor:
    """Return the same values in another shape; a size of -1 is inferred."""
    return reshape_axes(x, shape)


aten("view_as.default", "reshape_as.default")(lambda x, other: reshape_axes(x, other.shape))
aten("permute.default")(permute_axes)


@aten("flatten.using_ints")
def flatten(x: TorchTensor, start_dim: int = 0, end_dim: int = -1) -> TorchTensor:
    """Merge the axes from `start_dim` to `end_dim`."""
    if x.ndim == 0:
        return reshape_axes(x, (1,))
    start = start_dim % x.ndim
    end = end_dim % x.ndim + 1
    return reshape_axes(x, (*x.shape[:start], math.prod(x.shape[start:end]), *x.shape[end:]))


@aten("unflatten.int")
def unflatten(x: TorchTensor, dim: int, sizes: Sizes) -> TorchTensor:
    """Split an axis into several axes."""
    dim %= x.ndim
    return reshape_axes(x, (*x.shape[:dim], *sizes, *x.shape[dim + 1 :]))


@aten("transpose.int", "swapaxes.default", "swapdims.default")
def transpose(x: TorchTensor, first: int, second: int) -> TorchTensor:
    """Swap two axes."""
    if x.ndim == 0:
        return x
    numbers = list(range(x.ndim))
    numbers[first], numbers[second] = numbers[second], numbers[first]
    return permute_axes(x, numbers)


aten("t.default", "mT.default")(lambda x: x if x.ndim < 2 else transpose(x, -2, -1))
aten("numpy_T.default")(lambda x: permute_axes(x, range(x.ndim)[::-1]))


@aten("movedim.intlist", "movedim.int")
def move_axes(x: TorchTensor, source: int | Sizes, destination: int | Sizes) -> TorchTensor:
    """Move axes to other positions."""
    # The size of each axis is its number.
    moved = np.moveaxis(np.empty(range(x.ndim)), source, destination)
    return permute_axes(x, moved.shape)


@aten("unsqueeze.default")
def unsqueeze(x: TorchTensor, dim: int) -> TorchTensor:
    """Insert an axis of size 1."""
    if not -x.ndim - 1 <= dim <= x.ndim:
        raise ValueError(f"axis {dim} of an array with {x.ndim} axes")
    dim %= x.ndim + 1
    order = tuple(number + (number >= dim) for number in x.order)
    return TorchTensor(x.array[None], (dim, *order))


@aten("squeeze.dim", "squeeze.dims", "squeeze.default")
def squeeze(x: TorchTensor, dim: int | Sizes | None = None) -> TorchTensor:
    """Remove the axes of size 1, or only the axes in `dim`."""
    dims = (dim,) if isinstance(dim, int) else dim
    numbers = range(x.ndim) if dims is None else dims
    removed = [number % x.ndim for number in numbers if x.shape[number] == 1]
    return drop_axes(x, removed, jnp.squeeze(x.array, x.axes(removed)))


@aten("expand.default", "broadcast_to.default")
def expand(x: TorchTensor, sizes: Sizes, *, implicit: bool = False) -> TorchTensor:
    """Repeat axes of size 1, and add leading axes; a size of -1 is the old size."""
    if len(sizes) < x.ndim:
        raise ValueError(f"shape {x.shape} can't be expanded to {tuple(sizes)}")
    num_new = len(sizes) - x.ndim
    pairs = zip(x.shape, sizes[num_new:], strict=True)
    shape = [*sizes[:num_new], *(old if size == -1 else size for old, size in pairs)]
    order = (*range(num_new), *(number + num_new for number in x.order))
    return TorchTensor(jnp.broadcast_to(x.array, [shape[number] for number in order]), order)


aten("expand_as.default")(lambda x, other: expand(x, other.shape))
aten("repeat.default")(plain(jnp.tile))
aten("tril.default")(plain(jnp.tril))
aten("triu.default")(plain(jnp.triu))


@aten("repeat_interleave.self_int")
def repeat_interleave(
    x: TorchTensor, repeats: int, dim: int | None = None, *, output_size: Any = None
) -> TorchTensor:
    """Repeat each value along an axis, whose size is then `output_size`."""
    if dim is None:
        return to_tensor(jnp.repeat(x.plain().reshape(-1), repeats))
    return x.with_array(jnp.repeat(x.array, repeats, x.axis(dim)))


@aten("repeat_interleave.self_Tensor")
@plain
def repeat_by_counts(
    x: Any, repeats: Any, dim: int | None = None, *, output_size: int | None = None
) -> Any:
    """Repeat each value along an axis by its count; `output_size` is the sum of the counts."""
    if dim is None:
        return _repeat(x.reshape(-1), repeats, 0, output_size)
    return _repeat(x, repeats, dim, output_size)


def _repeat(x: Any, repeats: Any, dim: int, output_size: int | None) -> Any:
    if output_size is None:
        raise ValueError("repeats that are computed must come with output_size")
    counts = jnp.broadcast_to(repeats, (x.shape[dim],))
    return jnp.repeat(x, counts, dim, total_repeat_length=output_size)


@aten("repeat_interleave.Tensor")
@plain
def repeat_indices(repeats: Any, *, output_size: int | None = None) -> Any:
    """Return each index as often as its count says; `output_size` is the sum of the counts."""
    numbers = jnp.arange(repeats.shape[0], dtype=jnp.int32)
    return _repeat(numbers, repeats, 0, output_size)


@aten("diff.default")
@plain
def diff(x: Any, n: int = 1, dim: int = -1, prepend: Any = None, append: Any = None) -> Any:
    """Return the n-th difference of neighbours along an axis."""
    if x.dtype == jnp.bool_:
        x, prepend, append = (a if a is None else a.astype(jnp.int32) for a in (x, prepend, append))
        return jnp.diff(x, n, dim, prepend, append).astype(jnp.bool_)
    return jnp.diff(x, n, dim, prepend, append)


@aten("diagonal.default")
@plain
def diagonal(x: Any, offset: int = 0, dim1: int = 0, dim2: int = 1) -> Any:
    """Return a diagonal of two axes as the last axis."""
    return jnp.diagonal(x, offset, dim1, dim2)


@aten("as_strided.default")
@plain
def as_strided(x: Any, size: Sizes, stride: Sizes, storage_offset: int | None = None) -> Any:
    """Return values at steps through memory, in which x has no gaps and PyTorch's order."""
    places = np.full((), storage_offset or 0)
    for length, step in zip(size, stride, strict=True):
        places = places[..., None] + np.arange(length) * step
    if places.size and not 0 <= places.min() <= places.max() < x.size:
        raise ValueError(f"steps {tuple(stride)} of shape {tuple(size)} leave an array {x.shape}")
    return x.reshape(-1)[places]


@aten("cat.default", "concat.default")
def concatenate(arrays: Sequence[TorchTensor], dim: int = 0) -> TorchTensor:
    """Join tensors along an axis."""
    # PyTorch ignores empty vectors, whatever the shape of the others.
    tensors = [array for array in arrays if array.shape != (0,)]
    order = max(tensors, key=count_values).order
    dtype = jnp.result_type(*(tensor.dtype for tensor in tensors))
    parts = [tensor.transpose(order).astype(dtype) for tensor in tensors]
    return TorchTensor(jnp.concatenate(parts, order.index(dim % len(order))), order)


aten("stack.default")(
    lambda arrays, dim=0: concatenate([unsqueeze(array, dim) for array in arrays], dim)
)


@aten("slice.Tensor")
def slice_axis(
    x: TorchTensor, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> TorchTensor:
    """Return a range of an axis; PyTorch writes the end of an axis as its greatest number."""
    axis = x.axis(dim)
    stop = None if isinstance(end, int) and end >= sys.maxsize else end
    return x.with_array(x.array[(slice(None),) * axis + (slice(start, stop, step),)])


@aten("select.int")
def select(x: TorchTensor, dim: int, index: int) -> TorchTensor:
    """Return the values at an index of an axis, without the axis."""
    size = x.shape[dim]
    if not -size <= index < size:
        raise ValueError(f"index {index} of an axis of size {size}")
    array = lax.index_in_dim(x.array, index, x.axis(dim), keepdims=False)
    return drop_axes(x, [dim % x.ndim], array)


@aten("narrow.default")
def narrow(x: TorchTensor, dim: int, start: int, length: int) -> TorchTensor:
    """Return a range of an axis by its start and length."""
    start = start if start >= 0 else start + x.shape[dim]
    return slice_axis(x, dim, start, start + length)


@aten("split.Tensor")
def split(x: TorchTensor, split_size: int, dim: int = 0) -> tuple[TorchTensor, ...]:
    """Split an axis into pieces of one size; the last may be smaller."""
    size = x.shape[dim]
    starts = range(0, max(size, 1), max(split_size, 1))
    _require_few(len(starts))
    return tuple(slice_axis(x, dim, start, min(start + split_size, size)) for start in starts)


@aten("split_with_sizes.default", "split.sizes", "split.default")
def split_with_sizes(x: TorchTensor, sizes: Sizes, dim: int = 0) -> tuple[TorchTensor, ...]:
    """Split an axis into pieces of several sizes."""
    _require_few(len(sizes))
    ends = itertools.accumulate(sizes)
    return tuple(slice_axis(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True))


@aten("chunk.default")
def chunk(x: TorchTensor, chunks: int, dim: int = 0) -> tuple[TorchTensor, ...]:
    """Split an axis into at most `chunks` pieces of one size; the last may be smaller."""
    if chunks < 1:
        raise ValueError(f"{chunks} chunks; must be at least 1")
    return split(x, -(-x.shape[dim] // chunks), dim)


@aten("unbind.int")
def unbind(x: TorchTensor, dim: int = 0) -> tuple[TorchTensor, ...]:
    """Return the values at each index of an axis, without the axis."""
    _require_few(x.shape[dim])
    return tuple(select(x, dim, index) for index in range(x.shape[dim]))


@aten("slice_scatter.default")
def slice_scatter(
    x: TorchTensor,
    source: TorchTensor,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> TorchTensor:
    """Return x with a range of an axis replaced by `source`."""
    slices = (slice(None),) * x.axis(dim) + (slice(start, end, step),)
    values = cast_array(source.transpose(x.order), x.dtype)
    return x.with_array(x.array.at[slices].set(values))


@aten("select_scatter.default")
def select_scatter(x: TorchTensor, source: TorchTensor, dim: int, index: int) -> TorchTensor:
    """Return x with the values at an index of an axis replaced by `source`."""
    return slice_scatter(x, unsqueeze(source, dim % x.ndim), dim, index, index + 1 or None)


@aten("unfold.default")
def unfold(x: TorchTensor, dimension: int, size: int, step: int) -> TorchTensor:
    """Return windows of an axis, `step` apart, whose values are a new last axis."""
    axis = dimension % max(x.ndim, 1)
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = jnp.take(x.plain(), starts[:, None] + np.arange(size), axis)
    return to_tensor(jnp.moveaxis(windows, axis + 1, -1))


aten("flip.default")(lambda x, dims: x.with_array(jnp.flip(x.array, x.axes(dims))))


@aten("roll.default")
def roll(x: TorchTensor, shifts: int | Sizes, dims: int | Sizes = ()) -> TorchTensor:
    """Rotate axes: values move from the end to the beginning."""
    amounts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    numbers = (dims,) if isinstance(dims, int) else tuple(dims)
    if not numbers:
        return to_tensor(jnp.roll(x.plain(), amounts[0]))
    return x.with_array(jnp.roll(x.array, amounts, x.axes(numbers)))


@aten("pad.default", "constant_pad_nd.default")
def pad(
    x: TorchTensor, pads: Sizes, mode: Any = "constant", value: float | None = None
) -> TorchTensor:
    """Pad the last axes by (before, after) for each, beginning with the last axis.

    A negative pad crops. The modes are constant, reflect, replicate and circular.
    """
    if isinstance(mode, int | float):
        value = mode
        mode = "constant"
    widths = [(0, 0)] * x.ndim
    for number in range(len(pads) // 2):
        widths[x.axis(-1 - number)] = (pads[2 * number], pads[2 * number + 1])
    if mode == "constant":
        filling = jnp.asarray(value or 0, x.dtype)
        return x.with_array(lax.pad(x.array, filling, [(low, high, 0) for low, high in widths]))
    modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    if mode not in modes:
        raise ValueError(f"padding {mode!r}; must be one of constant, {', '.join(modes)}")
    return x.with_array(jnp.pad(x.array, widths, modes[mode]))


for _axes in (1, 2, 3):
    aten(f"reflection_pad{_axes}d.default")(lambda x, pads: pad(x, pads, "reflect"))
    aten(f"replication_pad{_axes}d.default")(lambda x, pads: pad(x, pads, "replicate"))


@aten("pixel_shuffle.default")
@plain
def pixel_shuffle(x: Any, factor: int) -> Any:
    """Turn the channels of each pixel into factor x factor pixels."""
    *batch, channels, height, width = x.shape
    features = channels // factor**2
    parts = x.reshape((*batch, features, factor, factor, height, width))
    moved = jnp.moveaxis(parts, (-2, -4, -1, -3), (-4, -3, -2, -1))
    return moved.reshape((*batch, features, height * factor, width * factor))


@aten("channel_shuffle.default")
def channel_shuffle(x: TorchTensor, groups: int) -> TorchTensor:
    """Interleave the channels of groups."""
    batch, channels, *sizes = x.shape
    grouped = reshape_axes(x, (batch, groups, channels // groups, *sizes))
    return reshape_axes(transpose(grouped, 1, 2), x.shape)


def _require_few(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise ValueError(f"{pieces:,} pieces; must be at most {MAX_PIECES:,}")
