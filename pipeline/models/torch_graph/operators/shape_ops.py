"""Operators that move, cut, join and repeat axes."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from pipeline.models.torch_graph.laid import (
    Laid,
    count_values,
    drop_axes,
    laid,
    permute_axes,
    reshape_axes,
)
from pipeline.models.torch_graph.operator_table import aten, plain

Sizes = Sequence[int]

MAX_PIECES = 4096
"""Limit of the pieces that an array is cut into, each of which takes time to trace."""


@aten("view.default", "reshape.default", "_unsafe_view.default", "_reshape_alias.default")
def view(x: Laid, shape: Sizes, *_: Any) -> Laid:
    """The same values in another shape; -1 stands for the remaining size."""
    return reshape_axes(x, shape)


aten("view_as.default", "reshape_as.default")(lambda x, other: reshape_axes(x, other.shape))
aten("permute.default")(permute_axes)


@aten("flatten.using_ints")
def flatten(x: Laid, start_dim: int = 0, end_dim: int = -1) -> Laid:
    """Axes from one to another merged."""
    if x.ndim == 0:
        return reshape_axes(x, (1,))
    start = start_dim % x.ndim
    end = end_dim % x.ndim + 1
    return reshape_axes(x, (*x.shape[:start], math.prod(x.shape[start:end]), *x.shape[end:]))


@aten("unflatten.int")
def unflatten(x: Laid, dim: int, sizes: Sizes) -> Laid:
    """An axis split into several."""
    dim %= x.ndim
    product = math.prod(size for size in sizes if size != -1)
    inferred = [x.shape[dim] // product if size == -1 else size for size in sizes]
    return reshape_axes(x, (*x.shape[:dim], *inferred, *x.shape[dim + 1 :]))


@aten("transpose.int", "swapaxes.default", "swapdims.default")
def transpose(x: Laid, first: int, second: int) -> Laid:
    """Two axes exchanged."""
    if x.ndim == 0:
        return x
    numbers = list(range(x.ndim))
    numbers[first], numbers[second] = numbers[second], numbers[first]
    return permute_axes(x, numbers)


aten("t.default", "numpy_T.default", "mT.default")(
    lambda x: x if x.ndim < 2 else transpose(x, -2, -1)
)


@aten("movedim.intlist", "movedim.int")
def move_axes(x: Laid, source: int | Sizes, destination: int | Sizes) -> Laid:
    """Axes moved to other places."""
    sources = [source] if isinstance(source, int) else list(source)
    targets = [destination] if isinstance(destination, int) else list(destination)
    places = dict(zip((t % x.ndim for t in targets), (s % x.ndim for s in sources), strict=True))
    fixed = iter(number for number in range(x.ndim) if number not in places.values())
    return permute_axes(x, [places[at] if at in places else next(fixed) for at in range(x.ndim)])


@aten("unsqueeze.default")
def unsqueeze(x: Laid, dim: int) -> Laid:
    """An axis of size 1 inserted."""
    if not -x.ndim - 1 <= dim <= x.ndim:
        raise ValueError(f"axis {dim} of an array with {x.ndim} axes")
    dim %= x.ndim + 1
    order = tuple(number + (number >= dim) for number in x.order)
    return Laid(x.array[None], (dim, *order))


@aten("squeeze.dim", "squeeze.dims", "squeeze.default")
def squeeze(x: Laid, dim: int | Sizes | None = None) -> Laid:
    """Axes of size 1 removed: all, or those that are named."""
    named = range(x.ndim) if dim is None else (dim,) if isinstance(dim, int) else dim
    removed = [number % x.ndim for number in named if x.shape[number] == 1]
    return drop_axes(x, removed, jnp.squeeze(x.array, x.axes(removed)))


@aten("expand.default", "broadcast_to.default")
def expand(x: Laid, sizes: Sizes, *, implicit: bool = False) -> Laid:
    """Axes of size 1 repeated, and new leading axes; -1 is the old size."""
    if len(sizes) < x.ndim:
        raise ValueError(f"shape {x.shape} can't be expanded to {tuple(sizes)}")
    new = len(sizes) - x.ndim
    shape = [old if size == -1 else size for old, size in zip(x.shape, sizes[new:], strict=True)]
    shape = [*sizes[:new], *shape]
    order = (*range(new), *(number + new for number in x.order))
    return Laid(jnp.broadcast_to(x.array, [shape[number] for number in order]), order)


aten("expand_as.default")(lambda x, other: expand(x, other.shape))
aten("repeat.default")(plain(jnp.tile))
aten("tril.default")(plain(jnp.tril))
aten("triu.default")(plain(jnp.triu))


@aten("repeat_interleave.self_int")
def repeat_interleave(x: Laid, repeats: int, dim: int | None = None) -> Laid:
    """Each value repeated, along an axis."""
    if dim is None:
        return laid(jnp.repeat(x.plain().reshape(-1), repeats))
    return x.same(jnp.repeat(x.array, repeats, x.axis(dim)))


@aten("cat.default", "concat.default")
def concatenate(arrays: Sequence[Laid], dim: int = 0) -> Laid:
    """Arrays joined along an axis."""
    present = [array for array in arrays if array.shape != (0,)]
    order = max(present, key=count_values).order
    dtype = jnp.result_type(*(array.dtype for array in present))
    parts = [array.transpose(order).astype(dtype) for array in present]
    return Laid(jnp.concatenate(parts, order.index(dim % len(order))), order)


aten("stack.default")(
    lambda arrays, dim=0: concatenate([unsqueeze(array, dim) for array in arrays], dim)
)


@aten("slice.Tensor")
def cut(
    x: Laid, dim: int = 0, start: int | None = None, end: int | None = None, step: int = 1
) -> Laid:
    """A range of an axis."""
    axis = x.axis(dim)
    return x.same(x.array[(slice(None),) * axis + (slice(start, end, step),)])


@aten("select.int")
def select(x: Laid, dim: int, index: int) -> Laid:
    """One place of an axis, without the axis."""
    size = x.shape[dim]
    if not -size <= index < size:
        raise ValueError(f"index {index} of an axis of size {size}")
    array = lax.index_in_dim(x.array, index, x.axis(dim), keepdims=False)
    return drop_axes(x, [dim % x.ndim], array)


@aten("narrow.default")
def narrow(x: Laid, dim: int, start: int, length: int) -> Laid:
    """A range of an axis, by its length."""
    start = start if start >= 0 else start + x.shape[dim]
    return cut(x, dim, start, start + length)


@aten("split.Tensor", "split.default")
def split(x: Laid, split_size: int, dim: int = 0) -> tuple[Laid, ...]:
    """Pieces of an axis of one size; the last may be smaller."""
    size = x.shape[dim]
    starts = range(0, max(size, 1), max(split_size, 1))
    _require_few(len(starts))
    return tuple(cut(x, dim, start, min(start + split_size, size)) for start in starts)


@aten("split_with_sizes.default", "split.sizes")
def split_with_sizes(x: Laid, sizes: Sizes, dim: int = 0) -> tuple[Laid, ...]:
    """Pieces of an axis of these sizes."""
    _require_few(len(sizes))
    ends = itertools.accumulate(sizes)
    return tuple(cut(x, dim, end - size, end) for size, end in zip(sizes, ends, strict=True))


@aten("chunk.default")
def chunk(x: Laid, chunks: int, dim: int = 0) -> tuple[Laid, ...]:
    """At most `chunks` pieces of an axis, of one size but for the last."""
    if chunks < 1:
        raise ValueError(f"{chunks} chunks; must be at least 1")
    return split(x, -(-x.shape[dim] // chunks), dim)


@aten("unbind.int")
def unbind(x: Laid, dim: int = 0) -> tuple[Laid, ...]:
    """Every place of an axis, without the axis."""
    _require_few(x.shape[dim])
    return tuple(select(x, dim, index) for index in range(x.shape[dim]))


@aten("slice_scatter.default")
def slice_scatter(
    x: Laid,
    source: Laid,
    dim: int = 0,
    start: int | None = None,
    end: int | None = None,
    step: int = 1,
) -> Laid:
    """x with a range of an axis replaced."""
    where = (slice(None),) * x.axis(dim) + (slice(start, end, step),)
    return x.same(x.array.at[where].set(source.transpose(x.order).astype(x.dtype)))


@aten("select_scatter.default")
def select_scatter(x: Laid, source: Laid, dim: int, index: int) -> Laid:
    """x with one place of an axis replaced."""
    return slice_scatter(x, unsqueeze(source, dim % x.ndim), dim, index, index + 1 or None)


@aten("unfold.default")
def unfold(x: Laid, dimension: int, size: int, step: int) -> Laid:
    """Windows of an axis, each `step` after the last, whose values become a new last axis."""
    axis = dimension % max(x.ndim, 1)
    starts = np.arange(0, x.shape[axis] - size + 1, step)
    windows = jnp.take(x.plain(), starts[:, None] + np.arange(size), axis)
    return laid(jnp.moveaxis(windows, axis + 1, -1))


aten("flip.default")(lambda x, dims: x.same(jnp.flip(x.array, x.axes(dims))))


@aten("roll.default")
def roll(x: Laid, shifts: int | Sizes, dims: int | Sizes = ()) -> Laid:
    """Axes rotated: values that leave at the end enter at the beginning."""
    amounts = (shifts,) if isinstance(shifts, int) else tuple(shifts)
    numbers = (dims,) if isinstance(dims, int) else tuple(dims)
    if not numbers:
        return laid(jnp.roll(x.plain(), amounts[0]))
    return x.same(jnp.roll(x.array, amounts, x.axes(numbers)))


@aten("pad.default", "constant_pad_nd.default")
def pad(x: Laid, pads: Sizes, mode: Any = "constant", value: float | None = None) -> Laid:
    """Borders around the last axes, (before, after) from the last axis on.

    A negative border cuts. Modes: constant, reflect, replicate and circular.
    """
    if isinstance(mode, int | float):
        value = mode
        mode = "constant"
    widths = [(0, 0)] * x.ndim
    for number in range(len(pads) // 2):
        widths[x.axis(-1 - number)] = (pads[2 * number], pads[2 * number + 1])
    if mode == "constant":
        filling = jnp.asarray(value or 0, x.dtype)
        return x.same(lax.pad(x.array, filling, [(low, high, 0) for low, high in widths]))
    modes = {"reflect": "reflect", "replicate": "edge", "circular": "wrap"}
    if mode not in modes:
        raise ValueError(f"padding {mode!r} is not computed; must be constant, reflect, ...")
    return x.same(jnp.pad(x.array, widths, modes[mode]))


@aten("pixel_shuffle.default")
@plain
def pixel_shuffle(x: Any, factor: int) -> Any:
    """Channels of each pixel spread over factor x factor pixels."""
    *batch, channels, height, width = x.shape
    features = channels // factor**2
    parts = x.reshape((*batch, features, factor, factor, height, width))
    moved = jnp.moveaxis(parts, (-2, -4, -1, -3), (-4, -3, -2, -1))
    return moved.reshape((*batch, features, height * factor, width * factor))


@aten("channel_shuffle.default")
def channel_shuffle(x: Laid, groups: int) -> Laid:
    """Channels of several groups interleaved."""
    batch, channels, *sizes = x.shape
    grouped = reshape_axes(x, (batch, groups, channels // groups, *sizes))
    return reshape_axes(transpose(grouped, 1, 2), x.shape)


def _require_few(pieces: int) -> None:
    if pieces > MAX_PIECES:
        raise ValueError(f"{pieces:,} pieces; at most {MAX_PIECES:,} are computed")
