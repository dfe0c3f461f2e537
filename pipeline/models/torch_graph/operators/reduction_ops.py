"""Operators along axes: reductions, softmax in float32, sorting, selection and ranks."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    TorchTensor,
    aten,
    cast_array,
    compute_in_float32,
    drop_axes,
    is_float,
    plain,
    to_tensor,
)
from pipeline.models.torch_graph.operators.linear_algebra_ops import power_norm

Dims = int | Sequence[int] | None
Pair = tuple[TorchTensor, TorchTensor]
"""Values and their indices, int32."""


def reduce(x: TorchTensor, dim: Dims, keepdim: bool, function: Callable[..., Array]) -> TorchTensor:
    """Reduce the axes `dim`, by default all, by a function such as `jnp.sum`."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.ndim))
    numbers = [number % x.ndim for number in dims] if x.ndim else []
    array = function(x.array, axis=x.axes(numbers), keepdims=keepdim)
    return x.with_array(array) if keepdim else drop_axes(x, numbers, array)


def _cast(context: OperatorContext, x: TorchTensor, dtype: Any) -> TorchTensor:
    return x.with_array(cast_array(x.array, context.type_of(dtype, x.dtype)))


def _cast_terms(context: OperatorContext, x: TorchTensor, dtype: Any) -> TorchTensor:
    """Cast the terms of a sum or product: by default whole numbers and bools become int32."""
    is_whole = not jnp.issubdtype(x.dtype, jnp.inexact)
    return _cast(context, x, TypeOf("int32") if dtype is None and is_whole else dtype)


def _register(function: Callable[..., Array], *names: str, cast: Any = _cast) -> None:
    @aten(*names)
    def apply(
        context: OperatorContext,
        x: TorchTensor,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
    ) -> TorchTensor:
        return reduce(cast(context, x, dtype), dim, keepdim, function)


_register(jnp.mean, "mean.dim", "mean.default")
_register(jnp.sum, "sum.dim_IntList", "sum.default", cast=_cast_terms)
_register(jnp.prod, "prod.default", "prod.dim_int", cast=_cast_terms)
_register(jnp.max, "amax.default", "max.default")
_register(jnp.min, "amin.default", "min.default")
_register(jnp.any, "any.default", "any.dim", "any.dims")
_register(jnp.all, "all.default", "all.dim", "all.dims")


def _register_extreme(name: str, find_index: Callable[..., Array]) -> None:
    """Register `argmax`, and `max` along an axis with the indices; or both for `min`."""

    @aten(f"arg{name}.default")
    def find(x: TorchTensor, dim: int | None = None, keepdim: bool = False) -> TorchTensor:
        if dim is None or x.ndim == 0:
            return TorchTensor(find_index(x.plain().reshape(-1)).astype(jnp.int32), ())
        array = find_index(x.array, axis=x.axis(dim), keepdims=keepdim).astype(jnp.int32)
        return x.with_array(array) if keepdim else drop_axes(x, [dim % x.ndim], array)

    @aten(f"{name}.dim")
    def reduce_axis(
        x: TorchTensor, dim: int, keepdim: bool = False
    ) -> tuple[TorchTensor, TorchTensor]:
        if x.ndim == 0:
            return x, find(x)
        # Of equal values only the one at the index has a gradient.
        places = find(x, dim, True)
        values = x.with_array(jnp.take_along_axis(x.array, places.array, x.axis(dim)))
        if keepdim:
            return values, places
        removed = [dim % x.ndim]
        axes = x.axes(removed)
        values, places = (
            drop_axes(y, removed, jnp.squeeze(y.array, axes)) for y in (values, places)
        )
        return values, places


_register_extreme("max", jnp.argmax)
_register_extreme("min", jnp.argmin)


@aten("var.correction", "var.dim", "var.default")
def variance(
    x: TorchTensor,
    dim: Dims | bool = None,
    unbiased: Any = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> TorchTensor:
    """Return the variance over axes: the sum of squares divided by n - correction, by default 1.

    Some overloads have the boolean `unbiased`, a correction of 1 or 0, as their first argument.
    """
    if isinstance(dim, bool):
        unbiased = dim
        dim = None
    if not isinstance(unbiased, bool):
        raise ValueError(f"unbiased = {unbiased!r}; must be true or false")
    if correction is None:
        correction = 1 if unbiased else 0

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        compute_variance = partial(jnp.var, axis=axis, keepdims=keepdims, ddof=correction)
        return compute_in_float32(compute_variance, array)

    return reduce(x, dim, keepdim, compute)


@aten("std.correction", "std.dim", "std.default")
@wraps(variance, assigned=())
def deviation(*args: Any, **kwargs: Any) -> TorchTensor:
    """Return the standard deviation over axes."""
    var = variance(*args, **kwargs)
    # The gradient of equal values is 0, as PyTorch's is.
    is_zero = var.array == 0
    root = jnp.sqrt(jnp.where(is_zero, jnp.ones_like(var.array), var.array))
    return var.with_array(jnp.where(is_zero, jnp.zeros_like(root), root))


@aten("var_mean.correction", "var_mean.dim", "var_mean.default")
@wraps(variance, assigned=())
def variance_and_mean(
    x: TorchTensor,
    dim: Dims | bool = None,
    unbiased: Any = True,
    keepdim: bool = False,
    **options: Any,
) -> tuple[TorchTensor, TorchTensor]:
    """Return the variance and the mean over axes."""
    mean = reduce(x, None if isinstance(dim, bool) else dim, keepdim, jnp.mean)
    return variance(x, dim, unbiased, keepdim, **options), mean


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def vector_norm(
    x: TorchTensor, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> TorchTensor:
    """Return the norm over axes: sum(|x| ** order) ** (1 / order)."""
    order = 2 if order is None else order

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        return power_norm(array, order, axis, keepdims)

    return reduce(x, dim, keepdim, compute)


@aten("cumsum.default")
def cumulative_sum(
    context: OperatorContext, x: TorchTensor, dim: int, *, dtype: Any = None
) -> TorchTensor:
    """Return the sum of all values up to each index of an axis."""
    return x.with_array(jnp.cumsum(_cast_terms(context, x, dtype).array, x.axis(dim)))


@aten("cumprod.default")
def cumulative_product(
    context: OperatorContext, x: TorchTensor, dim: int, *, dtype: Any = None
) -> TorchTensor:
    """Return the product of all values up to each index of an axis."""
    return x.with_array(jnp.cumprod(_cast_terms(context, x, dtype).array, x.axis(dim)))


@aten("logcumsumexp.default")
def cumulative_log_sum(x: TorchTensor, dim: int) -> TorchTensor:
    """Return the logarithm of the sum of exponentials up to each index of an axis."""
    return x.with_array(lax.cumlogsumexp(x.array, x.axis(dim) if x.ndim else 0))


def _register_softmax(function: Callable[[Array, int], Array], *names: str) -> None:
    """Register a function of an array and an axis. It is computed in float32."""

    @aten(*names)
    def apply(context: OperatorContext, x: TorchTensor, dim: int, dtype: Any = None) -> TorchTensor:
        array = _cast(context, x, dtype).array
        return x.with_array(compute_in_float32(lambda a: function(a, x.axis(dim)), array))


_register_softmax(jax.nn.softmax, "softmax.int", "_softmax.default")
_register_softmax(jax.nn.log_softmax, "log_softmax.int", "_log_softmax.default")


@aten("logsumexp.default")
def log_sum_exp(x: TorchTensor, dim: Dims, keepdim: bool = False) -> TorchTensor:
    """Return the logarithm of the sum of exponentials over axes."""
    assert is_float(x), "exponentials need floating-point numbers"
    return reduce(x, dim, keepdim, jax.scipy.special.logsumexp)


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


def _take_rank(x: TorchTensor, rank: int | Array, dim: int, keepdim: bool) -> Pair:
    """Return the value of a rank of an axis, and its index. The rank may differ along the axis."""
    if x.ndim == 0:
        return _sort(x, dim, False)
    array = x.plain()
    order = _order(array, dim % x.ndim, False)
    shape = tuple(1 if axis == dim % x.ndim else size for axis, size in enumerate(x.shape))
    places = jnp.take_along_axis(order, jnp.broadcast_to(jnp.asarray(rank), shape), dim)
    kept = (jnp.take_along_axis(array, places, dim), places)
    first, second = kept if keepdim else [jnp.squeeze(a, dim) for a in kept]
    return to_tensor(first), to_tensor(second)


@aten("kthvalue.default")
def kth_value(x: TorchTensor, k: int, dim: int = -1, keepdim: bool = False) -> Pair:
    """Return the k-th smallest value of an axis, and its index."""
    return _take_rank(x, k - 1, dim, keepdim)


@aten("median.dim")
def median(x: TorchTensor, dim: int, keepdim: bool = False) -> Pair:
    """Return the lower median of an axis, or its first NaN, and the index."""
    if x.ndim == 0:
        return _sort(x, dim, False)
    size = x.shape[dim]
    # NaN is sorted after all numbers.
    count = (~jnp.isnan(x.plain())).sum(dim, keepdims=True, dtype=jnp.int32)
    return _take_rank(x, jnp.where(count < size, count, (size - 1) // 2), dim, keepdim)


aten("median.default")(lambda x: median(to_tensor(x.plain().reshape(-1)), 0)[0])


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
