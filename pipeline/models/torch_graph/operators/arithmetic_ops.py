"""Operators of several arrays that broadcast: arithmetic, comparisons, choices, and casts."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.laid import Laid, aligned
from pipeline.models.torch_graph.operator_table import OperatorContext, aten


def _both(*names: str, of: Callable[[Any, Any], Array]) -> None:
    """Register a function of two operands that broadcast."""

    @aten(*names)
    def apply(x: Any, other: Any) -> Any:
        (first, second), order = aligned((x, other))
        return Laid(of(first, second), order)


_both("mul.Tensor", "mul.Scalar", of=jnp.multiply)
_both("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar", of=lambda x, y: _power(x, y))
_both("maximum.default", "max.other", of=jnp.maximum)
_both("minimum.default", "min.other", of=jnp.minimum)
_both("atan2.default", of=jnp.arctan2)
_both("fmod.Scalar", "fmod.Tensor", of=jnp.fmod)
_both("remainder.Scalar", "remainder.Tensor", of=jnp.remainder)
_both("floor_divide.default", "floor_divide.Scalar", of=jnp.floor_divide)
_both("eq.Scalar", "eq.Tensor", of=jnp.equal)
_both("ne.Scalar", "ne.Tensor", of=jnp.not_equal)
_both("lt.Scalar", "lt.Tensor", of=jnp.less)
_both("le.Scalar", "le.Tensor", of=jnp.less_equal)
_both("gt.Scalar", "gt.Tensor", of=jnp.greater)
_both("ge.Scalar", "ge.Tensor", of=jnp.greater_equal)
_both("logical_and.default", of=jnp.logical_and)
_both("logical_or.default", of=jnp.logical_or)
_both("logical_xor.default", of=jnp.logical_xor)
_both("bitwise_and.Tensor", "bitwise_and.Scalar", of=jnp.bitwise_and)
_both("bitwise_or.Tensor", "bitwise_or.Scalar", of=jnp.bitwise_or)


def _power(x: Any, exponent: Any) -> Array:
    """x ** exponent; a product for small whole numbers, whose gradient is finite at 0."""
    if isinstance(exponent, int | float) and exponent == int(exponent) and abs(exponent) <= 16:
        return lax.integer_pow(x, int(exponent))
    return jnp.power(x, exponent)


@aten("add.Tensor", "add.Scalar")
def add(x: Any, other: Any, *, alpha: float = 1) -> Laid:
    """x + alpha * other."""
    (first, second), order = aligned((x, other))
    return Laid(jnp.add(first, second if alpha == 1 else alpha * second), order)


@aten("sub.Tensor", "sub.Scalar")
def subtract(x: Any, other: Any, *, alpha: float = 1) -> Laid:
    """x - alpha * other."""
    (first, second), order = aligned((x, other))
    return Laid(jnp.subtract(first, second if alpha == 1 else alpha * second), order)


@aten("rsub.Scalar", "rsub.Tensor")
def reverse_subtract(x: Any, other: Any, alpha: float = 1) -> Laid:
    """other - alpha * x."""
    (first, second), order = aligned((x, other))
    return Laid(jnp.subtract(second, first if alpha == 1 else alpha * first), order)


@aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
def divide(x: Any, other: Any, *, rounding_mode: str | None = None) -> Laid:
    """x / other, rounded towards zero (`trunc`) or down (`floor`) where asked."""
    (first, second), order = aligned((x, other))
    quotient = jnp.true_divide(first, second)
    if rounding_mode is None:
        return Laid(quotient, order)
    rounded = jnp.trunc(quotient) if rounding_mode == "trunc" else jnp.floor(quotient)
    return Laid(rounded.astype(jnp.result_type(first, second)), order)


@aten("lerp.Scalar", "lerp.Tensor")
def lerp(start: Any, end: Any, weight: Any) -> Laid:
    """start + weight * (end - start)."""
    (first, second, share), order = aligned((start, end, weight))
    return Laid(first + share * (second - first), order)


@aten("addcmul.default")
def addcmul(x: Any, first: Any, second: Any, *, value: float = 1) -> Laid:
    """x + value * first * second."""
    (a, b, c), order = aligned((x, first, second))
    return Laid(a + value * b * c, order)


@aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")
def where(condition: Laid, x: Any, other: Any) -> Laid:
    """x where the condition holds, else other."""
    (chosen, first, second), order = aligned((condition, x, other))
    return Laid(jnp.where(chosen, first, second), order)


@aten("masked_fill.Scalar", "masked_fill.Tensor")
def masked_fill(x: Laid, mask: Laid, value: Any) -> Laid:
    """The value where the mask holds, else x."""
    (array, chosen, filling), order = aligned((x, mask, value))
    return Laid(jnp.where(chosen, jnp.asarray(filling, array.dtype), array), order)


@aten("fill.Scalar", "fill.Tensor")
def fill(x: Laid, value: Any) -> Laid:
    """The value everywhere."""
    filling = value.array if isinstance(value, Laid) else value
    return x.same(jnp.full_like(x.array, filling))


@aten("zero.default")
def zero(x: Laid) -> Laid:
    """Zero everywhere."""
    return x.same(jnp.zeros_like(x.array))


@aten("copy.default")
def copy(x: Laid, source: Laid, non_blocking: bool = False) -> Laid:
    """The source, broadcast to the shape and cast to the type of x."""
    shape = [x.shape[number] for number in x.order]
    (_, second), _ = aligned((x, source))
    return x.same(jnp.broadcast_to(second, shape).astype(x.dtype))


@aten("nan_to_num.default")
def nan_to_num(
    x: Laid, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Laid:
    """x with NaN and infinities replaced."""
    return x.same(jnp.nan_to_num(x.array, nan=nan or 0.0, posinf=posinf, neginf=neginf))


@aten("to.dtype", "_to_copy.default", "to.dtype_layout", "type_as.default", "to.device")
def cast(context: OperatorContext, x: Laid, *args: Any, dtype: Any = None, **_: Any) -> Laid:
    """x in another type."""
    named = next((each for each in (dtype, *args) if isinstance(each, TypeOf)), None)
    like = next((each for each in args if isinstance(each, Laid)), None)
    if like is not None:
        return x.same(x.array.astype(like.dtype))
    return x if named is None else x.same(x.array.astype(context.type_of(named.name)))


@aten("scalar_tensor.default")
def scalar_tensor(context: OperatorContext, value: float, *, dtype: Any = None) -> Laid:
    """A number as an array without axes."""
    dtype = context.type_of(dtype.name) if isinstance(dtype, TypeOf) else jnp.dtype(context.dtype)
    return Laid(jnp.asarray(value, dtype), ())
