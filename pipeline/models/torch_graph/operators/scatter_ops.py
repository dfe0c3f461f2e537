"""Operators that write or add values at indices, each the reverse of a look-up.

Indices that repeat are combined by a rule. Their gradients are PyTorch's: a sum or a mean passes
them to all values, a largest or smallest value shares them among equal values.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import aten, cast_array, plain

Place = tuple[Any, ...]
"""Indices of an array, as in `x.at[place]`."""


def combine_at(x: Array, place: Place, source: Array, rule: str, include_self: bool) -> Array:
    """Return x with values of `source` combined at a place that may have equal indices.

    The rules are sum, prod, mean, amax and amin. Values of x at the place are combined too if
    `include_self`. Raises ValueError for another rule.
    """
    if rule not in _COMBINE:
        raise ValueError(f"rule {rule!r}; must be one of {', '.join(_COMBINE)}")
    source = source.astype(x.dtype)
    if not include_self:
        is_hit = jnp.zeros(x.shape, jnp.bool_).at[place].set(True)
        x = jnp.where(is_hit, jnp.asarray(_find_identity(rule, x.dtype), x.dtype), x)
    return _COMBINE[rule](x, place, source, include_self)


def _find_identity(rule: str, dtype: Any) -> Any:
    """Return the value that changes no result of a rule."""
    if rule in ("sum", "mean", "prod"):
        return 1 if rule == "prod" else 0
    if jnp.issubdtype(dtype, jnp.floating):
        return -np.inf if rule == "amax" else np.inf
    info = jnp.iinfo(dtype)
    return info.min if rule == "amax" else info.max


def _add(x: Array, place: Place, source: Array, include_self: bool) -> Array:
    return x.at[place].add(source)


def _average(x: Array, place: Place, source: Array, include_self: bool) -> Array:
    """Return means; quotients of integers are rounded down."""
    total = x.at[place].add(source)
    ones = jnp.full(x.shape, int(include_self), jnp.int32)
    count = jnp.maximum(ones.at[place].add(1), 1)
    if jnp.issubdtype(x.dtype, jnp.integer):
        return total // count.astype(x.dtype)
    return total / count.astype(x.dtype)


def _multiply(x: Array, place: Place, source: Array, include_self: bool) -> Array:
    """Return products. JAX has no gradient of them, so it is added by terms whose value is 0."""
    still_x = lax.stop_gradient(x)
    still = lax.stop_gradient(source)
    # A product of all factors but one is that of the factors that aren't 0, unless one is.
    num_zeros = (still_x == 0).astype(jnp.int32).at[place].add((still == 0).astype(jnp.int32))
    factors = jnp.where(still == 0, jnp.ones_like(still), still)
    product = jnp.where(still_x == 0, 1, still_x).astype(x.dtype).at[place].multiply(factors)
    value = jnp.where(num_zeros > 0, jnp.zeros_like(product), product)
    if not jnp.issubdtype(x.dtype, jnp.inexact):
        return value

    def leave_out(factor: Array, zeros: Array, total: Array) -> Array:
        is_zero = factor == 0
        others = total / jnp.where(is_zero, jnp.ones_like(factor), factor)
        return jnp.where(zeros == is_zero, others, jnp.zeros_like(others))

    slopes = leave_out(still, num_zeros[place], product[place])
    terms = (x - still_x) * leave_out(still_x, num_zeros, product)
    return value + terms.at[place].add((source - still) * slopes)


def _make_extreme(name: str) -> Callable[[Array, Place, Array, bool], Array]:
    """Return a function that combines values by `max` or `min` of an array's updates."""

    def combine(x: Array, place: Place, source: Array, include_self: bool) -> Array:
        still_x = lax.stop_gradient(x)
        still = lax.stop_gradient(source)
        value = getattr(still_x.at[place], name)(still)
        if not jnp.issubdtype(x.dtype, jnp.inexact):
            return value
        is_x = (still_x == value).astype(x.dtype)
        is_source = (still == value[place]).astype(x.dtype)
        count = jnp.maximum(is_x.at[place].add(is_source), 1)
        # Terms whose value is 0 and whose gradient is shared among equal values. Infinite values
        # have none.
        own = jnp.where(jnp.isfinite(x), x - still_x, 0) * is_x / count
        other = jnp.where(jnp.isfinite(source), source - still, 0) * is_source / count[place]
        return value + own.at[place].add(other)

    return combine


_COMBINE: Mapping[str, Callable[[Array, Place, Array, bool], Array]] = {
    "sum": _add,
    "prod": _multiply,
    "mean": _average,
    "amax": _make_extreme("max"),
    "amin": _make_extreme("min"),
}
"""Functions that combine values at a place, by PyTorch's names of the rules."""


def place_along(x: Array, dim: int, indices: Array) -> Place:
    """Return the place that an array of indices of an axis names, in the shape of `indices`."""
    axis = dim % max(x.ndim, 1)
    if x.ndim == 0:
        return (jnp.zeros_like(indices),)
    grids = jnp.meshgrid(*(jnp.arange(n) for n in indices.shape), indexing="ij", sparse=True)
    return (*grids[:axis], indices, *grids[axis + 1 :])


def _crop(source: Any, x: Array, indices: Array) -> Array:
    """Return the values of the source, or a number, in the shape of the indices."""
    array = cast_array(jnp.asarray(source), x.dtype)
    if array.ndim == 0:
        return jnp.broadcast_to(array, indices.shape)
    return array[tuple(slice(size) for size in indices.shape)]


def _run_flat(function: Callable[[Array], Array], x: Array) -> Array:
    """Apply a function of vectors and larger arrays; a number is a vector of one value."""
    return function(x[None])[0] if x.ndim == 0 else function(x)


@aten("scatter.src", "scatter.value")
@plain
def scatter(x: Any, dim: int, indices: Any, source: Any) -> Any:
    """Return x with values of the source at indices of an axis."""
    indices = jnp.atleast_1d(indices) if x.ndim == 0 else indices
    values = _crop(source, x, indices)
    return _run_flat(lambda a: a.at[place_along(a, dim, indices)].set(values), x)


def _combine_along(
    x: Any, dim: int, indices: Any, source: Any, rule: str, include_self: bool = True
) -> Array:
    """Return x with values of the source, or a number, combined at indices of an axis."""
    indices = jnp.atleast_1d(indices) if x.ndim == 0 else indices
    values = _crop(source, x, indices)

    def combine(a: Array) -> Array:
        return combine_at(a, place_along(a, dim, indices), values, rule, include_self)

    return _run_flat(combine, x)


aten("scatter_add.default")(
    plain(lambda x, dim, indices, source: _combine_along(x, dim, indices, source, "sum"))
)


@aten("scatter_reduce.two")
@plain
def scatter_reduce(
    x: Any, dim: int, indices: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Return x with values of the source combined at indices of an axis."""
    return _combine_along(x, dim, indices, source, reduce, include_self)


@aten("scatter.reduce", "scatter.value_reduce")
@plain
def scatter_by_name(x: Any, dim: int, indices: Any, source: Any, *, reduce: str) -> Any:
    """Return x with values added or multiplied at indices of an axis."""
    rules = {"add": "sum", "multiply": "prod"}
    return _combine_along(x, dim, indices, source, rules.get(reduce, reduce))


def _place_rows(x: Array, dim: int, indices: Array) -> Place:
    """Return the place of whole slices of an axis."""
    return (slice(None),) * (dim % max(x.ndim, 1)) + (jnp.atleast_1d(indices),)


@aten("index_add.default")
@plain
def index_add(x: Any, dim: int, indices: Any, source: Any, *, alpha: float = 1) -> Any:
    """Return x plus alpha times the slices of the source, at indices of an axis."""
    values = (source if alpha == 1 else alpha * source).astype(x.dtype)
    return _run_flat(lambda a: a.at[_place_rows(a, dim, indices)].add(values), x)


@aten("index_reduce.default")
@plain
def index_reduce(
    x: Any, dim: int, indices: Any, source: Any, reduce: str, *, include_self: bool = True
) -> Any:
    """Return x with the slices of the source combined at indices of an axis."""
    place = _place_rows(x, dim, indices)
    return combine_at(x, place, source, reduce, include_self)


@aten("index_copy.default")
@plain
def index_copy(x: Any, dim: int, indices: Any, source: Any) -> Any:
    """Return x with the slices of the source at indices of an axis."""
    return _run_flat(lambda a: a.at[_place_rows(a, dim, indices)].set(source), x)


@aten("index_fill.int_Scalar", "index_fill.int_Tensor")
@plain
def index_fill(x: Any, dim: int, indices: Any, value: Any) -> Any:
    """Return x with one value in the slices at indices of an axis."""
    filling = cast_array(jnp.asarray(value), x.dtype)
    return _run_flat(lambda a: a.at[_place_rows(a, dim, indices)].set(filling), x)


@aten("index_put.default", "_unsafe_index_put.default")
@plain
def index_put(x: Any, indices: Sequence[Any], values: Any, accumulate: bool = False) -> Any:
    """Return x with values at indices: arrays of whole numbers or masks, or None for a whole axis.

    A mask must be alone, and its values broadcast to x.
    """
    masks = [array for array in indices if array is not None and array.dtype == jnp.bool_]
    values = cast_array(values, x.dtype)
    if not masks:
        place = tuple(slice(None) if array is None else array for array in indices)
        return x.at[place].add(values) if accumulate else x.at[place].set(values)
    if len(masks) != len(indices) or len(masks) > 1 or values.size != 1:
        raise ValueError("values at a mask must be one number: others depend on the data")
    mask = masks[0].reshape(masks[0].shape + (1,) * (x.ndim - masks[0].ndim))
    return jnp.where(mask, values.reshape(()) + (x if accumulate else 0), x).astype(x.dtype)


@aten("masked_scatter.default")
@plain
def masked_scatter(x: Any, mask: Any, source: Any) -> Any:
    """Return x with the values of the source, in their order, where the mask is true."""
    shape = jnp.broadcast_shapes(x.shape, mask.shape)
    mask = jnp.broadcast_to(mask, shape)
    numbers = jnp.clip(jnp.cumsum(mask.reshape(-1)) - 1, 0, max(source.size - 1, 0))
    values = source.reshape(-1)[numbers].reshape(shape)
    return jnp.where(mask, values, jnp.broadcast_to(x, shape))
