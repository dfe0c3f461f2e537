"""Look-ups by index, sizes that may depend on the batch, and arrays made from sizes.

Sizes are Python's numbers while JAX traces.
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
    register,
)
from pipeline.models.torch_graph.tensor import Tensor, to_tensor


@aten("index.Tensor")
@plain
def index(x: Any, indices: Sequence[Any]) -> Any:
    """Values at places that arrays of whole numbers name, axis by axis; None takes all."""
    if any(places is not None and places.dtype == jnp.bool_ for places in indices):
        raise ValueError("a choice by a mask, whose size depends on the data")
    return x[tuple(slice(None) if places is None else places for places in indices)]


@aten("embedding.default")
def embedding(weight: Tensor, indices: Tensor, *_: Any) -> Tensor:
    """Rows of a table by their numbers."""
    return to_tensor(jnp.take(weight.plain(), indices.plain(), axis=0, mode="clip"))


@aten("gather.default")
@plain
def gather(x: Any, dim: int, places: Any, *, sparse_grad: bool = False) -> Any:
    """Values at places of an axis, one for each value of `places`."""
    return jnp.take_along_axis(x, places, axis=dim)


aten("index_select.default")(
    plain(lambda x, dim, places: jnp.take(x, places, axis=dim, mode="clip"))
)


@aten("one_hot.default")
@plain
def one_hot(x: Any, num_classes: int = -1) -> Any:
    """1 at the number of a class, else 0, int32."""
    if num_classes < 0:
        raise ValueError("one_hot must be given its number of classes")
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int32)


@aten("full.default")
def full(context: OperatorContext, size: Sequence[int], value: Any, *, dtype: Any = None) -> Tensor:
    """A number everywhere, of a shape."""
    integer = jnp.int32 if isinstance(value, int) else None
    default = jnp.bool_ if isinstance(value, bool) else integer
    return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype, default)))


@aten("new_full.default")
def new_full(
    context: OperatorContext, x: Tensor, size: Sequence[int], value: Any, *, dtype: Any = None
) -> Tensor:
    """A number everywhere, of a shape, in the type of x."""
    return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype, x.dtype)))


@aten("full_like.default")
def full_like(context: OperatorContext, x: Tensor, value: Any, *, dtype: Any = None) -> Tensor:
    """A number everywhere, of the shape of x."""
    return x.with_array(jnp.full(x.array.shape, value, context.type_of(dtype, x.dtype)))


def _register_constant(name: str, value: int, *overloads: str) -> None:
    """Register `zeros`, `new_zeros` and `zeros_like`, or their likes for another number."""

    def make(context: OperatorContext, size: Sequence[int], *, dtype: Any = None) -> Tensor:
        return to_tensor(jnp.full(tuple(size), value, context.type_of(dtype)))

    register((f"{name}.default", *overloads), AtenOperator(make))

    @aten(f"new_{name}.default")
    def make_new(
        context: OperatorContext, x: Tensor, size: Sequence[int], *, dtype: Any = None
    ) -> Tensor:
        return new_full(context, x, size, value, dtype=dtype)

    @aten(f"{name}_like.default")
    def make_like(context: OperatorContext, x: Tensor, *, dtype: Any = None) -> Tensor:
        return full_like(context, x, value, dtype=dtype)


_register_constant("zeros", 0)
_register_constant("ones", 1)
# A network that reads an empty array without filling it gets zeros instead of random bits.
_register_constant("empty", 0, "empty.memory_format")


@aten("arange.default", "arange.start", "arange.start_step")
def arange(
    context: OperatorContext, start: Any, end: Any = None, step: Any = None, *, dtype: Any = None
) -> Tensor:
    """Numbers from a start, or from 0, to an end by a step."""
    is_integer = all(isinstance(bound, int | None) for bound in (start, end, step))
    dtype = context.type_of(dtype, jnp.int32 if is_integer else None)
    return to_tensor(jnp.arange(start, end, step).astype(dtype))


def _number(value: Any) -> Any:
    """Return a size; while a program is exported some are symbols that compute as numbers do."""
    if isinstance(value, bool | str | tuple | Tensor) or value is None:
        raise ValueError(f"{value!r} is no size")
    return value


_SIZES: Mapping[str, Callable[..., Any]] = {
    "add": lambda x, y: _number(x) + _number(y),
    "sub": lambda x, y: _number(x) - _number(y),
    "mul": lambda x, y: _number(x) * _number(y),
    "floordiv": lambda x, y: _number(x) // _number(y),
    "truediv": lambda x, y: _number(x) / _number(y),
    "mod": lambda x, y: _number(x) % _number(y),
    "neg": lambda x: -_number(x),
    "sym_max": lambda x, y: max(_number(x), _number(y)),
    "sym_min": lambda x, y: min(_number(x), _number(y)),
    "sym_float": lambda x: float(_number(x)),
    "sym_int": lambda x: int(_number(x)),
    "sym_sqrt": lambda x: math.sqrt(_number(x)),
}
"""Functions of sizes, which are Python's numbers."""
for _name, _function in _SIZES.items():
    OPERATORS[f"sym.{_name}"] = AtenOperator(_function, "", draws=False, full_weights=False)


@aten("sym_size.int")
def size_of(x: Tensor, dim: int) -> int:
    """The size of an axis, a Python number."""
    return x.array.shape[x.axis(dim)]
