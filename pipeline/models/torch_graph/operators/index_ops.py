"""Look-ups by index, arrays made from sizes, and operators that write or add values at indices,
each the reverse of a look-up."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import (
    OPERATORS,
    AtenOperator,
    OperatorContext,
    TorchTensor,
    aten,
    cast_array,
    plain,
    to_tensor,
)


@aten("index.Tensor")
@plain
def index(x: Any, indices: Sequence[Any]) -> Any:
    """Return values at indices: an array of whole numbers for each axis, or None for all of it."""
    if any(array is not None and array.dtype == jnp.bool_ for array in indices):
        raise ValueError("an index is a mask, which has a size that depends on the data")
    return x[tuple(slice(None) if array is None else array for array in indices)]


@aten("embedding.default")
@plain
def embedding(weight: Any, indices: Any, padding_idx: int = -1, *_: bool) -> Any:
    """Return rows of the weight; the row `padding_idx` gets no gradient, as in PyTorch."""
    rows = jnp.take(weight, indices, axis=0, mode="clip")
    if padding_idx < 0:
        return rows
    return jnp.where((indices == padding_idx)[..., None], lax.stop_gradient(rows), rows)


@aten("gather.default")
@plain
def gather(x: Any, dim: int, indices: Any, *, sparse_grad: bool = False) -> Any:
    """Return values at indices of an axis, in the shape of `indices`."""
    if x.ndim == 0:
        return jnp.broadcast_to(x, indices.shape)
    return x[place_along(x, dim, indices)]


aten("index_select.default")(
    plain(lambda x, dim, indices: jnp.take(x, indices, axis=dim, mode="clip"))
)


@dataclass(frozen=True)
class BagSettings:
    """Settings of bags of embeddings, in ATen's order."""

    scale_grad_by_freq: bool = False
    mode: int = 0
    sparse: bool = False
    per_sample_weights: TorchTensor | None = None
    include_last_offset: bool = False
    padding_idx: int | None = -1


@aten(
    "_embedding_bag.default",
    "_embedding_bag_forward_only.default",
    "embedding_bag.default",
    "embedding_bag.padding_idx",
    settings=BagSettings,
)
def embedding_bag(
    weight: TorchTensor, indices: TorchTensor, offsets: TorchTensor, settings: BagSettings
) -> tuple[TorchTensor]:
    """Return the sum (mode 0), mean (1) or maximum (2) of the rows of each bag.

    Bags are ranges of the indices, each from its offset to the next. Rows of the index
    `padding_idx` are in no bag. Results of the operator after the first aren't returned.
    """
    numbers = indices.plain().reshape(-1)
    starts = offsets.plain()
    count = starts.shape[0] - int(settings.include_last_offset)
    bags = jnp.searchsorted(starts[:count], jnp.arange(numbers.shape[0]), side="right") - 1
    if settings.padding_idx is not None and settings.padding_idx >= 0:
        bags = jnp.where(numbers == settings.padding_idx, count, bags)
    rows = jnp.take(weight.plain(), numbers, axis=0, mode="clip")
    if settings.per_sample_weights is not None:
        rows = rows * settings.per_sample_weights.plain().reshape(-1, 1).astype(rows.dtype)
    if settings.mode not in (0, 1, 2):
        raise ValueError(f"mode {settings.mode}; must be 0, 1 or 2")
    rule = ("sum", "mean", "amax")[settings.mode]
    # Rows in no bag go to a last one, which is removed. An empty bag is 0.
    empty = jnp.zeros((count + 1, rows.shape[1]), rows.dtype)
    return (to_tensor(combine_at(empty, (bags,), rows, rule, include_self=False)[:count]),)


@aten("one_hot.default")
@plain
def one_hot(x: Any, num_classes: int = -1) -> Any:
    """Return 1 at the index of a class and 0 elsewhere, int32."""
    if num_classes < 0:
        raise ValueError("one_hot must have a number of classes")
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int32)


@aten("full.default")
def full(
    context: OperatorContext, size: Sequence[int], value: Any, *, dtype: Any = None
) -> TorchTensor:
    """Return an array of shape `size`, all of whose values are `value`."""
    default: Any = None
    if isinstance(value, int):
        default = jnp.bool_ if isinstance(value, bool) else jnp.int32
    return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype, default)))


@aten("new_full.default")
def new_full(
    context: OperatorContext, x: TorchTensor, size: Sequence[int], value: Any, *, dtype: Any = None
) -> TorchTensor:
    """Return an array of `value`, of shape `size`, by default in the dtype of x."""
    return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype, x.dtype)))


@aten("full_like.default")
def full_like(
    context: OperatorContext, x: TorchTensor, value: Any, *, dtype: Any = None
) -> TorchTensor:
    """Return an array of `value` in the shape and, by default, the dtype of x."""
    return x.with_array(jnp.full(x.array.shape, value, context.type_of(dtype, x.dtype)))


for _name, _value in (("zeros", 0.0), ("ones", 1.0), ("empty", 0.0)):
    # `empty` returns zeros, since JAX has no uninitialised arrays.
    _overload = "memory_format" if _name == "empty" else "default"
    aten(f"{_name}.{_overload}")(partial(full, value=_value))
    aten(f"new_{_name}.default")(partial(new_full, value=_value))
    aten(f"{_name}_like.default")(partial(full_like, value=_value))


@aten("empty_strided.default")
def empty_strided(
    context: OperatorContext, size: Sequence[int], stride: Sequence[int], *, dtype: Any = None
) -> TorchTensor:
    """Return zeros of a shape, whose order in memory has no effect."""
    return full(context, size, 0.0, dtype=dtype)


@aten("arange.default", "arange.start", "arange.start_step")
def arange(
    context: OperatorContext, start: Any, end: Any = None, step: Any = None, *, dtype: Any = None
) -> TorchTensor:
    """Return the numbers from `start` to `end` by `step`, or from 0 to `start` without `end`."""
    # A size of an exported program is neither an int nor a float.
    is_integer = not any(isinstance(bound, float) for bound in (start, end, step))
    dtype = context.type_of(dtype, jnp.int32 if is_integer else None)
    return to_tensor(jnp.arange(start, end, step).astype(dtype))


def _require_size(value: Any) -> Any:
    """Return a size as it is. Raises ValueError for a value that can't be a size."""
    if isinstance(value, bool | str | tuple | TorchTensor) or value is None:
        raise ValueError(f"{value!r} must be a size")
    return value


def _to_float(size: Any) -> Any:
    """Return a size as a float; one that is unknown during an export as an array."""
    return float(size) if isinstance(size, int | float) else jnp.asarray(size, jnp.float32)


_SIZES: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: _require_size(x) + _require_size(y),
    "sub": lambda x, y: _require_size(x) - _require_size(y),
    "mul": lambda x, y: _require_size(x) * _require_size(y),
    "floordiv": lambda x, y: _require_size(x) // _require_size(y),
    "truediv": lambda x, y: _require_size(x) / _require_size(y),
    "mod": lambda x, y: _require_size(x) % _require_size(y),
    "neg": lambda x: -_require_size(x),
    "sym_max": lambda x, y: max(_require_size(x), _require_size(y)),
    "sym_min": lambda x, y: min(_require_size(x), _require_size(y)),
    "sym_float": lambda x: _to_float(_require_size(x)),
    "sym_int": lambda x: int(_require_size(x)),
    "sym_sqrt": lambda x: _to_float(_require_size(x)) ** 0.5,
}
"""Functions of sizes by name."""
for _name, _function in _SIZES.items():
    OPERATORS[f"sym.{_name}"] = AtenOperator(_function)


@aten("sym_numel.default")
def count_of(x: TorchTensor) -> int:
    """Return the number of values."""
    return math.prod(x.shape)


@aten("sym_stride.int")
def stride_of(x: TorchTensor, dim: int) -> int:
    """Return the step of an axis through memory without gaps, in PyTorch's order."""
    return math.prod(x.shape[dim % x.ndim + 1 :])


@aten("sym_storage_offset.default")
def offset_of(x: TorchTensor) -> int:
    """Return the place in memory of the first value."""
    return 0


@aten("sym_size.int")
def size_of(x: TorchTensor, dim: int) -> int:
    """Return the size of an axis."""
    return x.array.shape[x.axis(dim)]


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
