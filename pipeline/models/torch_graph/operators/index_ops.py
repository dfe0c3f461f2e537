"""Look-ups by index, arrays made from sizes, and arithmetic of sizes.

A size is a number of Python, or a symbol while a program is exported for any batch size.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.torch_graph.operator_table import (
    OPERATORS,
    AtenOperator,
    OperatorContext,
    TorchTensor,
    aten,
    plain,
    to_tensor,
)
from pipeline.models.torch_graph.operators.scatter_ops import combine_at, place_along


@aten("index.Tensor")
@plain
def index(x: Any, indices: Sequence[Any]) -> Any:
    """Return values at indices: an array of whole numbers for each axis, or None for all of it."""
    if any(array is not None and array.dtype == jnp.bool_ for array in indices):
        raise ValueError("an index is a mask, which has a size that depends on the data")
    return x[tuple(slice(None) if array is None else array for array in indices)]


aten("embedding.default")(
    plain(lambda weight, indices, *_: jnp.take(weight, indices, axis=0, mode="clip"))
)


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
    is_integer = all(isinstance(bound, int | None) for bound in (start, end, step))
    dtype = context.type_of(dtype, jnp.int32 if is_integer else None)
    return to_tensor(jnp.arange(start, end, step).astype(dtype))


def _require_size(value: Any) -> Any:
    """Return a size as it is. Raises ValueError for a value that can't be a size."""
    if isinstance(value, bool | str | tuple | TorchTensor) or value is None:
        raise ValueError(f"{value!r} must be a size")
    return value


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
    "sym_float": lambda x: float(_require_size(x)),
    "sym_int": lambda x: int(_require_size(x)),
    "sym_sqrt": lambda x: math.sqrt(_require_size(x)),
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
