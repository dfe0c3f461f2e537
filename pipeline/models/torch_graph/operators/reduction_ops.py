"""Sums, means, extremes and softmax over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.laid import Laid, drop_axes
from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    aten,
    compute_in_float32,
    is_float,
)

Dims = int | Sequence[int] | None


def reduce(x: Laid, dim: Dims, keepdim: bool, function: Callable[..., Array]) -> Laid:
    """Reduce axes with a function like `jnp.sum`; all axes where `dim` names none."""
    named = (dim,) if isinstance(dim, int) else tuple(dim or range(x.ndim))
    numbers = [number % max(x.ndim, 1) for number in named] if x.ndim else []
    array = function(x.array, axis=x.axes(numbers), keepdims=keepdim)
    return x.same(array) if keepdim else drop_axes(x, numbers, array)


def _cast(context: OperatorContext, x: Laid, dtype: Any) -> Laid:
    return x.same(x.array.astype(context.type_of(dtype, x.dtype)))


def _register(function: Callable[..., Array], *names: str) -> None:
    """Register a reduction."""

    @aten(*names)
    def apply(
        context: OperatorContext,
        x: Laid,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
    ) -> Laid:
        return reduce(_cast(context, x, dtype), dim, keepdim, function)


_register(jnp.mean, "mean.dim", "mean.default")
_register(jnp.sum, "sum.dim_IntList", "sum.default")
_register(jnp.prod, "prod.default", "prod.dim_int")
_register(jnp.max, "amax.default", "max.default")
_register(jnp.min, "amin.default", "min.default")
_register(jnp.any, "any.default", "any.dim")
_register(jnp.all, "all.default", "all.dim")


def _register_extreme(
    name: str, extreme: Callable[..., Array], place: Callable[..., Array]
) -> None:
    """Register `argmax` and, of one axis, the largest values with their places; or the smallest."""

    @aten(f"arg{name}.default")
    def find(x: Laid, dim: int | None = None, keepdim: bool = False) -> Laid:
        if dim is None:
            return Laid(place(x.plain().reshape(-1)).astype(jnp.int32), ())
        array = place(x.array, axis=x.axis(dim), keepdims=keepdim).astype(jnp.int32)
        return x.same(array) if keepdim else drop_axes(x, [dim % x.ndim], array)

    @aten(f"{name}.dim")
    def reduce_axis(x: Laid, dim: int, keepdim: bool = False) -> tuple[Laid, Laid]:
        return reduce(x, dim, keepdim, extreme), find(x, dim, keepdim)


_register_extreme("max", jnp.max, jnp.argmax)
_register_extreme("min", jnp.min, jnp.argmin)


@aten("var.correction", "var.dim", "var.default")
def variance(
    x: Laid, dim: Dims | bool = None, unbiased: Any = True, keepdim: bool = False, **options: Any
) -> Laid:
    """Variance over axes; by default divided by n - 1."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if not isinstance(unbiased, bool):
        raise ValueError(f"unbiased = {unbiased!r}; must be true or false")
    correction = options.get("correction", 1 if unbiased else 0)
    correction = 1 if correction is None else correction
    keepdim = options.get("keepdim", keepdim)

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        return compute_in_float32(
            lambda a: jnp.var(a, axis=axis, keepdims=keepdims, ddof=correction), array
        )

    return reduce(x, dim, keepdim, compute)


@aten("std.correction", "std.dim", "std.default")
def deviation(x: Laid, *args: Any, **options: Any) -> Laid:
    """Standard deviation over axes."""
    var = variance(x, *args, **options)
    return var.same(jnp.sqrt(var.array))


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def vector_norm(
    x: Laid, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Laid:
    """Norm over axes: the root of the sum of the powers of `order`."""
    order = 2 if order is None else order

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        if order == 2:
            return jnp.sqrt(jnp.sum(jnp.square(array), axis=axis, keepdims=keepdims))
        powers = jnp.sum(jnp.abs(array) ** order, axis=axis, keepdims=keepdims)
        return powers ** (1 / order)

    return reduce(x, dim, keepdim, compute)


@aten("cumsum.default")
def cumulative_sum(context: OperatorContext, x: Laid, dim: int, *, dtype: Any = None) -> Laid:
    """Sum of all values up to each place of an axis."""
    return x.same(jnp.cumsum(_cast(context, x, dtype).array, x.axis(dim)))


@aten("softmax.int", "_softmax.default")
def softmax(context: OperatorContext, x: Laid, dim: int, dtype: Any = None) -> Laid:
    """Exponentials over their sum along an axis, in float32."""
    array = _cast(context, x, dtype).array
    return x.same(compute_in_float32(lambda a: jax.nn.softmax(a, x.axis(dim)), array))


@aten("log_softmax.int", "_log_softmax.default")
def log_softmax(context: OperatorContext, x: Laid, dim: int, dtype: Any = None) -> Laid:
    """Logarithm of the softmax, in float32."""
    array = _cast(context, x, dtype).array
    return x.same(compute_in_float32(lambda a: jax.nn.log_softmax(a, x.axis(dim)), array))


@aten("logsumexp.default")
def log_sum_exp(x: Laid, dim: Dims, keepdim: bool = False) -> Laid:
    """Logarithm of the sum of exponentials over axes."""
    assert is_float(x), "the exponentials of whole numbers are no whole numbers"
    return reduce(x, dim, keepdim, jax.scipy.special.logsumexp)
