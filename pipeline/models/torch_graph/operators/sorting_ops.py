"""Operators that sort, select and rank values along an axis."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import aten, plain
from pipeline.models.torch_graph.tensor import TorchTensor, to_tensor

Pair = tuple[TorchTensor, TorchTensor]
"""Values and their indices, int32."""


def _order(x: Array, axis: int, descending: bool) -> Array:
    """Return the indices that sort an axis, int32; equal values stay in order. NaN is largest."""
    ordered = lax.stop_gradient(x)
    if not descending:
        return jnp.argsort(ordered, axis, stable=True).astype(jnp.int32)
    # Of the reversed axis, so that equal values stay in order and NaN comes first.
    reversed_order = jnp.argsort(jnp.flip(ordered, axis), axis, stable=True)
    last = ordered.shape[axis] - 1
    return jnp.flip(last - reversed_order, axis).astype(jnp.int32)


def _take(x: TorchTensor, indices: Array, axis: int) -> Pair:
    values = jnp.take_along_axis(x.array, indices, axis)
    return x.with_array(values), x.with_array(indices)


def _sort(x: TorchTensor, dim: int, descending: bool) -> Pair:
    if x.ndim == 0:
        return x, to_tensor(jnp.zeros((), jnp.int32))
    axis = x.axis(dim)
    return _take(x, _order(x.array, axis, descending), axis)


aten("sort.default")(lambda x, dim=-1, descending=False: _sort(x, dim, descending))
aten("argsort.default")(lambda x, dim=-1, descending=False: _sort(x, dim, descending)[1])


@aten("sort.stable")
def sort_stably(x: TorchTensor, *, stable: Any, dim: int = -1, descending: bool = False) -> Pair:
    """Return the sorted values of an axis, and their indices."""
    return _sort(x, dim, descending)


@aten("argsort.stable")
def argsort_stably(
    x: TorchTensor, *, stable: bool, dim: int = -1, descending: bool = False
) -> TorchTensor:
    """Return the indices that sort an axis."""
    return _sort(x, dim, descending)[1]


aten("msort.default")(lambda x: _sort(x, 0, False)[0])


@aten("topk.default")
def topk(x: TorchTensor, k: int, dim: int = -1, largest: bool = True, *others: bool) -> Pair:
    """Return the k largest or smallest values of an axis, sorted, and their indices."""
    if x.ndim == 0:
        return _sort(x, dim, False)
    axis = x.axis(dim)
    size = x.array.shape[axis]
    if not 0 <= k <= size:
        raise ValueError(f"{k} values of an axis of size {size}")
    if largest and axis == x.ndim - 1:
        # Much faster than a sort. It is of the last axis.
        indices = lax.top_k(lax.stop_gradient(x.array), k)[1]
        return _take(x, indices.astype(jnp.int32), axis)
    indices = lax.slice_in_dim(_order(x.array, axis, largest), 0, k, axis=axis)
    return _take(x, indices, axis)


def _select(x: TorchTensor, rank: Callable[[int], int], dim: int, keepdim: bool) -> Pair:
    """Return the value of a rank of an axis, by the size of the axis, and its index."""
    if x.ndim == 0:
        return _sort(x, dim, False)
    values, indices = (part.plain() for part in _sort(x, dim, False))
    number = rank(x.shape[dim])
    kept = [lax.slice_in_dim(a, number, number + 1, axis=dim % x.ndim) for a in (values, indices)]
    first, second = kept if keepdim else [jnp.squeeze(a, dim) for a in kept]
    return to_tensor(first), to_tensor(second)


@aten("kthvalue.default")
def kth_value(x: TorchTensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """Return the k-th smallest value of an axis, and its index."""
    return _select(x, lambda size: k - 1, dim, keepdim)


@aten("median.dim")
def median(x: TorchTensor, dim: int, keepdim: bool = False) -> Pair:
    """Return the lower median of an axis, and its index."""
    return _select(x, lambda size: (size - 1) // 2, dim, keepdim)


aten("median.default")(
    lambda x: _select(to_tensor(x.plain().reshape(-1)), lambda size: (size - 1) // 2, 0, False)[0]
)


def _register_running(name: str, is_better: Callable[[Array, Array], Array]) -> None:
    """Register the largest or smallest value up to each index of an axis, and its index."""

    def merge(before: tuple[Array, Array], after: tuple[Array, Array]) -> tuple[Array, Array]:
        # Of equal values the last is returned, as in PyTorch.
        is_new = is_better(after[0], before[0]) | jnp.isnan(after[0])
        pairs = zip(after, before, strict=True)
        first, second = (jnp.where(is_new, new, old) for new, old in pairs)
        return first, second

    @aten(name)
    def run(x: TorchTensor, dim: int) -> Pair:
        if x.ndim == 0:
            return _sort(x, dim, False)
        axis = x.axis(dim)
        numbers = lax.broadcasted_iota(jnp.int32, x.array.shape, axis)
        still = lax.stop_gradient(x.array)
        _, indices = jax.lax.associative_scan(merge, (still, numbers), axis=axis)
        return _take(x, indices, axis)


_register_running("cummax.default", lambda new, old: new >= old)
_register_running("cummin.default", lambda new, old: new <= old)


def _search(edges: Array, values: Array, is_right: bool) -> Array:
    side = "right" if is_right else "left"
    if edges.ndim == 1:
        return jnp.searchsorted(edges, values, side=side).astype(jnp.int32)
    flat = edges.reshape(-1, edges.shape[-1])
    rows = values.reshape(flat.shape[0], -1)
    found = jax.vmap(lambda a, v: jnp.searchsorted(a, v, side=side))(flat, rows)
    return found.reshape(values.shape).astype(jnp.int32)


@aten("searchsorted.Tensor", "searchsorted.Scalar")
@plain
def searchsorted(
    edges: Any,
    values: Any,
    *,
    out_int32: bool = False,
    right: bool = False,
    side: str | None = None,
    sorter: Any = None,
) -> Any:
    """Return the index in sorted values at which each value would be inserted, int32."""
    edges = edges if sorter is None else jnp.take_along_axis(edges, sorter, -1)
    return _search(edges, jnp.asarray(values), right or side == "right")


@aten("bucketize.Tensor", "bucketize.Scalar")
@plain
def bucketize(values: Any, edges: Any, *, out_int32: bool = False, right: bool = False) -> Any:
    """Return the number of edges that are below each value, or at most it with `right`, int32."""
    return _search(edges, jnp.asarray(values), right)


@aten("bincount.default")
@plain
def bincount(x: Any, weights: Any = None, minlength: int = 0) -> Any:
    """Return how often each number below `minlength` occurs.

    Raises ValueError without `minlength`, since the length would depend on the data. Numbers of
    at least it aren't counted.
    """
    if minlength < 1:
        raise ValueError("bincount must have minlength: without it the length depends on the data")
    counts = jnp.zeros(minlength, jnp.int32 if weights is None else weights.dtype)
    return counts.at[x].add(1 if weights is None else weights, mode="drop")


@aten("histc.default")
@plain
def histc(x: Any, bins: int = 100, low: Any = 0, high: Any = 0) -> Any:
    """Return the number of values in each of some equal bins from `low` to `high`."""
    if low == high:
        lowest, highest = jnp.min(x), jnp.max(x)
        low = jnp.where(lowest == highest, lowest - 1, lowest)
        high = jnp.where(lowest == highest, highest + 1, highest)
    place = jnp.floor((x - low) / (high - low) * bins).astype(jnp.int32)
    is_inside = (x >= low) & (x <= high)
    place = jnp.where(is_inside, jnp.minimum(place, bins - 1), bins)
    return jnp.zeros(bins, x.dtype).at[place.reshape(-1)].add(1, mode="drop")
