"""Look-ups by index, sizes that may depend on the batch, and arrays made from sizes.

Sizes are Python's numbers while JAX traces.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.laid import Laid, laid
from pipeline.models.torch_graph.operator_table import (
    OPERATORS,
    AtenOperator,
    OperatorContext,
    aten,
    plain,
)


@aten("index.Tensor")
@plain
def index(x: Any, indices: Sequence[Any]) -> Any:
    """Values at places that arrays of whole numbers name, axis by axis; None takes all."""
    for each in indices:
        if each is not None and each.dtype == jnp.bool_:
            raise ValueError("a choice by a mask, whose size depends on the data")
    return x[tuple(slice(None) if each is None else each for each in indices)]


@aten("embedding.default")
def embedding(weight: Laid, indices: Laid, *_: Any) -> Laid:
    """Rows of a table by their numbers."""
    return laid(jnp.take(weight.plain(), indices.plain(), axis=0, mode="clip"))


@aten("gather.default")
@plain
def gather(x: Any, dim: int, places: Any, *, sparse_grad: bool = False) -> Any:
    """Values at places of an axis, one for each value of `places`."""
    return jnp.take_along_axis(x, places, axis=dim)


@aten("index_select.default")
@plain
def index_select(x: Any, dim: int, places: Any) -> Any:
    """Places of an axis by their numbers."""
    return jnp.take(x, places, axis=dim, mode="clip")


@aten("one_hot.default")
@plain
def one_hot(x: Any, num_classes: int = -1) -> Any:
    """1 at the number of a class, else 0, int32."""
    if num_classes < 0:
        raise ValueError("one_hot must be given its number of classes")
    return jax.nn.one_hot(x, num_classes, dtype=jnp.int32)


def _made(name: str, of: Callable[..., Any]) -> None:
    """Register `zeros` and its kin, of sizes, and `new_zeros`, beside an array."""

    @aten(f"{name}.default", *([f"{name}.memory_format"] if name == "empty" else []))
    def make(context: OperatorContext, size: Sequence[int], *, dtype: Any = None) -> Laid:
        return laid(of(tuple(size), _type(context, dtype, None)))

    @aten(f"new_{name}.default")
    def make_beside(
        context: OperatorContext, x: Laid, size: Sequence[int], *, dtype: Any = None
    ) -> Laid:
        return laid(of(tuple(size), _type(context, dtype, x)))


_made("zeros", jnp.zeros)
_made("ones", jnp.ones)
# Whatever reads an empty array without filling it gets zeros instead of random bits.
_made("empty", jnp.zeros)


@aten("full.default")
def full(context: OperatorContext, size: Sequence[int], value: Any, *, dtype: Any = None) -> Laid:
    """A number everywhere, of a shape."""
    return laid(jnp.full(tuple(size), value, _filled_type(context, value, dtype, None)))


@aten("new_full.default")
def new_full(
    context: OperatorContext, x: Laid, size: Sequence[int], value: Any, *, dtype: Any = None
) -> Laid:
    """A number everywhere, of a shape, in the type of x."""
    return laid(jnp.full(tuple(size), value, _type(context, dtype, x)))


@aten("full_like.default")
def full_like(context: OperatorContext, x: Laid, value: Any, *, dtype: Any = None) -> Laid:
    """A number everywhere, of the shape of x."""
    return x.same(jnp.full(x.array.shape, value, _type(context, dtype, x)))


@aten("zeros_like.default", "empty_like.default")
def zeros_like(context: OperatorContext, x: Laid, *, dtype: Any = None) -> Laid:
    """Zeros of the shape of x."""
    return full_like(context, x, 0, dtype=dtype)


@aten("ones_like.default")
def ones_like(context: OperatorContext, x: Laid, *, dtype: Any = None) -> Laid:
    """Ones of the shape of x."""
    return full_like(context, x, 1, dtype=dtype)


@aten("arange.default", "arange.start", "arange.start_step")
def arange(context: OperatorContext, *bounds: Any, dtype: Any = None) -> Laid:
    """Numbers from a start to an end by a step."""
    whole = all(isinstance(bound, int) for bound in bounds)
    kind = jnp.int32 if whole else jnp.dtype(context.dtype)
    kind = context.type_of(dtype.name) if isinstance(dtype, TypeOf) else kind
    return laid(jnp.arange(*bounds).astype(kind))


def _type(context: OperatorContext, dtype: Any, like: Laid | None) -> Any:
    if isinstance(dtype, TypeOf):
        return context.type_of(dtype.name)
    return jnp.dtype(context.dtype) if like is None else like.dtype


def _filled_type(context: OperatorContext, value: Any, dtype: Any, like: Laid | None) -> Any:
    if isinstance(value, bool) and dtype is None:
        return jnp.bool_
    if isinstance(value, int) and dtype is None:
        return jnp.int32
    return _type(context, dtype, like)


def _size(*names: str, of: Callable[..., Any]) -> None:
    """Register a function of sizes, which are Python's numbers."""
    for name in names:
        OPERATORS[f"sym.{name}"] = AtenOperator(of, "", draws=False, full_weights=False)


def _number(value: Any) -> Any:
    """Return a size; while a program is exported some are symbols that compute as numbers do."""
    if isinstance(value, bool | str | tuple | Laid) or value is None:
        raise ValueError(f"{value!r} is no size")
    return value


_size("add", of=lambda x, y: _number(x) + _number(y))
_size("sub", of=lambda x, y: _number(x) - _number(y))
_size("mul", of=lambda x, y: _number(x) * _number(y))
_size("floordiv", of=lambda x, y: _number(x) // _number(y))
_size("truediv", of=lambda x, y: _number(x) / _number(y))
_size("mod", of=lambda x, y: _number(x) % _number(y))
_size("neg", of=lambda x: -_number(x))
_size("sym_max", of=lambda x, y: max(_number(x), _number(y)))
_size("sym_min", of=lambda x, y: min(_number(x), _number(y)))
_size("sym_float", of=lambda x: float(_number(x)))
_size("sym_int", of=lambda x: int(_number(x)))
_size("sym_sqrt", of=lambda x: math.sqrt(_number(x)))


@aten("sym_size.int")
def size_of(x: Laid, dim: int) -> int:
    """The size of an axis, a Python number."""
    return x.array.shape[x.axis(dim)]
