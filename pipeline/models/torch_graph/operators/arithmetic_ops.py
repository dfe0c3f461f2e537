"""Operators of several arrays that broadcast: arithmetic, comparisons, choices, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.laid import Laid, align
from pipeline.models.torch_graph.operator_table import OperatorContext, aten, broadcasting


def _register(function: Callable[[Any, Any], Array], *names: str) -> None:
    """Register a function of two operands that broadcast."""
    aten(*names)(broadcasting(lambda x, other: function(x, other)))


_register(jnp.multiply, "mul.Tensor", "mul.Scalar")
_register(jnp.maximum, "maximum.default", "max.other")
_register(jnp.minimum, "minimum.default", "min.other")
_register(jnp.arctan2, "atan2.default")
_register(jnp.fmod, "fmod.Scalar", "fmod.Tensor")
_register(jnp.remainder, "remainder.Scalar", "remainder.Tensor")
_register(jnp.floor_divide, "floor_divide.default", "floor_divide.Scalar")
_register(jnp.equal, "eq.Scalar", "eq.Tensor")
_register(jnp.not_equal, "ne.Scalar", "ne.Tensor")
_register(jnp.less, "lt.Scalar", "lt.Tensor")
_register(jnp.less_equal, "le.Scalar", "le.Tensor")
_register(jnp.greater, "gt.Scalar", "gt.Tensor")
_register(jnp.greater_equal, "ge.Scalar", "ge.Tensor")
_register(jnp.logical_and, "logical_and.default")
_register(jnp.logical_or, "logical_or.default")
_register(jnp.logical_xor, "logical_xor.default")
_register(jnp.bitwise_and, "bitwise_and.Tensor", "bitwise_and.Scalar")
_register(jnp.bitwise_or, "bitwise_or.Tensor", "bitwise_or.Scalar")


@aten("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
@broadcasting
def power(x: Any, exponent: Any) -> Array:
    """x ** exponent; a product for small whole numbers, whose gradient is finite at 0."""
    if isinstance(exponent, int | float) and exponent == int(exponent) and abs(exponent) <= 16:
        return lax.integer_pow(x, int(exponent))
    return jnp.power(x, exponent)


@aten("add.Tensor", "add.Scalar")
@broadcasting
def add(x: Any, other: Any, *, alpha: float = 1) -> Array:
    """x + alpha * other."""
    return jnp.add(x, other if alpha == 1 else alpha * other)


@aten("sub.Tensor", "sub.Scalar")
@broadcasting
def subtract(x: Any, other: Any, *, alpha: float = 1) -> Array:
    """x - alpha * other."""
    return jnp.subtract(x, other if alpha == 1 else alpha * other)


@aten("rsub.Scalar", "rsub.Tensor")
@broadcasting
def reverse_subtract(x: Any, other: Any, alpha: float = 1) -> Array:
    """other - alpha * x."""
    return jnp.subtract(other, x if alpha == 1 else alpha * x)


@aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
@broadcasting
def divide(x: Any, other: Any, *, rounding_mode: str | None = None) -> Array:
    """x / other, rounded towards zero by `trunc` or down by `floor`."""
    quotient = jnp.true_divide(x, other)
    if rounding_mode is None:
        return quotient
    rounded = jnp.trunc(quotient) if rounding_mode == "trunc" else jnp.floor(quotient)
    return rounded.astype(jnp.result_type(x, other))


@aten("lerp.Scalar", "lerp.Tensor")
@broadcasting
def lerp(start: Any, end: Any, weight: Any) -> Array:
    """start + weight * (end - start)."""
    return start + weight * (end - start)


@aten("addcmul.default")
@broadcasting
def addcmul(x: Any, first: Any, second: Any, *, value: float = 1) -> Array:
    """x + value * first * second."""
    return x + value * first * second


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
@broadcasting
def where(condition: Any, x: Any, other: Any) -> Array:
    """x where the condition holds, else other."""
    return jnp.where(condition, x, other)


@aten("masked_fill.Scalar", "masked_fill.Tensor")
@broadcasting
def masked_fill(x: Any, mask: Any, value: Any) -> Array:
    """The value where the mask holds, else x."""
    return jnp.where(mask, jnp.asarray(value, x.dtype), x)


@aten("fill.Scalar", "fill.Tensor")
def fill(x: Laid, value: Any) -> Laid:
    """The value everywhere."""
    return x.same(jnp.full_like(x.array, value.array if isinstance(value, Laid) else value))


@aten("copy.default")
def copy(x: Laid, source: Laid, non_blocking: bool = False) -> Laid:
    """The source, broadcast to the shape and cast to the type of x."""
    (_, second), _ = align((x, source))
    return x.same(jnp.broadcast_to(second, x.array.shape).astype(x.dtype))


@aten("to.dtype", "_to_copy.default", "to.dtype_layout", "type_as.default", "to.device")
def cast(context: OperatorContext, x: Laid, *args: Any, dtype: Any = None, **_: Any) -> Laid:
    """x in another type."""
    for argument in args:
        if isinstance(argument, Laid):
            return x.same(x.array.astype(argument.dtype))
    argument = next((value for value in (dtype, *args) if isinstance(value, TypeOf)), None)
    return x.same(x.array.astype(context.type_of(argument, x.dtype)))


@aten("scalar_tensor.default")
def scalar_tensor(context: OperatorContext, value: float, *, dtype: Any = None) -> Laid:
    """A number as an array without axes."""
    return Laid(jnp.asarray(value, context.type_of(dtype)), ())
