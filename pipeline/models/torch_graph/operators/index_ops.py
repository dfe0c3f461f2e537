"""Look-ups by index, sizes that may depend on the batch, and arrays made from sizes.

Sizes are numbers of Python while JAX traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.torch_graph.operator_table import (
    OPERATORS,
    AtenOperator,
    OperatorContext,
    aten,
    plain,
)
from pipeline.models.torch_graph.tensor import TorchTensor, to_tensor


@aten("index.Tensor")
@plain
def index(x: Any, indices: Sequence[Any]) -> Any:
    """Return values at indices: whole numbers for each axis, or None for the whole axis."""
    if any(array is not None and array.dtype == jnp.bool_ for array in indices):
        raise ValueError("an index is a mask, which has a size that depends on the data")
    return x[tuple(slice(None) if array is None else array for array in indices)]


@aten("embedding.default")
def embedding(weight: TorchTensor, indices: TorchTensor, *_: Any) -> TorchTensor:
    """Return rows of a table by their indices."""
    return to_tensor(jnp.take(weight.plain(), indices.plain(), axis=0, mode="clip"))


@aten("gather.default")
@plain
def gather(x: Any, dim: int, places: Any, *, sparse_grad: bool = False) -> Any:
    """Return values at the indices `places` of an axis, in the shape of `places`."""
    return jnp.take_along_axis(x, places, axis=dim)


aten("index_select.default")(
    plain(lambda x, dim, places: jnp.take(x, places, axis=dim, mode="clip"))
)


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
    """Return an array of a number, of shape `size`."""
    integer = jnp.int32 if isinstance(value, int) else None
    default = jnp.bool_ if isinstance(value, bool) else integer
    return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype, default)))


@aten("new_full.default")
def new_full(
    context: OperatorContext, x: TorchTensor, size: Sequence[int], value: Any, *, dtype: Any = None
) -> TorchTensor:
    """Return an array of a number, of shape `size`, in the dtype of x."""
    return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype, x.dtype)))


@aten("full_like.default")
def full_like(
    context: OperatorContext, x: TorchTensor, value: Any, *, dtype: Any = None
) -> TorchTensor:
    """Return an array of a number in the shape of x."""
    return x.with_array(jnp.full(x.array.shape, value, context.type_of(dtype, x.dtype)))


def _register_constant(name: str, value: int, overload: str = "default") -> None:
    """Register `zeros`, `new_zeros` and `zeros_like`, or the operators of another number."""

    @aten(f"{name}.{overload}")
    def make(context: OperatorContext, size: Sequence[int], *, dtype: Any = None) -> TorchTensor:
        return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype)))

    @aten(f"new_{name}.default")
    def make_new(
        context: OperatorContext, x: TorchTensor, size: Sequence[int], *, dtype: Any = None
    ) -> TorchTensor:
        return new_full(context, x, size, value, dtype=dtype)

    @aten(f"{name}_like.default")
    def make_like(context: OperatorContext, x: TorchTensor, *, dtype: Any = None) -> TorchTensor:
        return full_like(context, x, value, dtype=dtype)


_register_constant("zeros", 0)
_register_constant("ones", 1)
# An empty array has zeros instead of random bits.
_register_constant("empty", 0, "memory_format")


@aten("arange.default", "arange.start", "arange.start_step")
def arange(
    context: OperatorContext, start: Any, end: Any = None, step: Any = None, *, dtype: Any = None
) -> TorchTensor:
    """Return the numbers from a start to an end by a step; with one number, from 0 to it."""
    is_integer = all(isinstance(bound, int | None) for bound in (start, end, step))
    dtype = context.type_of(dtype, jnp.int32 if is_integer else None)
    return to_tensor(jnp.arange(start, end, step).astype(dtype))


def _require_size(value: Any) -> Any:
    """Return a size: a number, or a symbol while a program is exported."""
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


@aten("sym_size.int")
def size_of(x: TorchTensor, dim: int) -> int:
    """Return the size of an axis."""
    return x.array.shape[x.axis(dim)]
