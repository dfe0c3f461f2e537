"""Sums, means, extremes and softmax over axes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.laid import Laid, without_axes
from pipeline.models.torch_graph.operator_table import OperatorContext, aten, in_float32, is_float

Dims = int | Sequence[int] | None


def reduce(x: Laid, dim: Dims, keepdim: bool, of: Callable[..., Array]) -> Laid:
    """Reduce axes, all where none is named, with a function like `jnp.sum`."""
    named = (dim,) if isinstance(dim, int) else tuple(dim or range(x.ndim))
    numbers = [number % max(x.ndim, 1) for number in named] if x.ndim else []
    array = of(x.array, axis=x.axes(numbers), keepdims=keepdim)
    return x.same(array) if keepdim else without_axes(x, numbers, array)


def _typed(context: OperatorContext, x: Laid, dtype: Any) -> Laid:
    if not isinstance(dtype, TypeOf):
        return x
    return x.same(x.array.astype(context.type_of(dtype.name)))


@aten("mean.dim", "mean.default")
def mean(
    context: OperatorContext, x: Laid, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Laid:
    """Mean over axes."""
    return reduce(_typed(context, x, dtype), dim, keepdim, jnp.mean)


@aten("sum.dim_IntList", "sum.default")
def total(
    context: OperatorContext, x: Laid, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> Laid:
    """Sum over axes."""
    return reduce(_typed(context, x, dtype), dim, keepdim, jnp.sum)


@aten("amax.default")
def amax(x: Laid, dim: Dims = (), keepdim: bool = False) -> Laid:
    """Largest value over axes."""
    return reduce(x, dim, keepdim, jnp.max)


@aten("amin.default")
def amin(x: Laid, dim: Dims = (), keepdim: bool = False) -> Laid:
    """Smallest value over axes."""
    return reduce(x, dim, keepdim, jnp.min)


@aten("max.default")
def largest(x: Laid) -> Laid:
    """Largest value of all."""
    return reduce(x, None, False, jnp.max)


@aten("min.default")
def smallest(x: Laid) -> Laid:
    """Smallest value of all."""
    return reduce(x, None, False, jnp.min)


@aten("max.dim")
def largest_of_axis(x: Laid, dim: int, keepdim: bool = False) -> tuple[Laid, Laid]:
    """Largest value of an axis, and where it is."""
    return reduce(x, dim, keepdim, jnp.max), argmax(x, dim, keepdim)


@aten("min.dim")
def smallest_of_axis(x: Laid, dim: int, keepdim: bool = False) -> tuple[Laid, Laid]:
    """Smallest value of an axis, and where it is."""
    return reduce(x, dim, keepdim, jnp.min), argmin(x, dim, keepdim)


@aten("argmax.default")
def argmax(x: Laid, dim: int | None = None, keepdim: bool = False) -> Laid:
    """Where the largest value of an axis is, int32."""
    return _place(x, dim, keepdim, jnp.argmax)


@aten("argmin.default")
def argmin(x: Laid, dim: int | None = None, keepdim: bool = False) -> Laid:
    """Where the smallest value of an axis is, int32."""
    return _place(x, dim, keepdim, jnp.argmin)


def _place(x: Laid, dim: int | None, keepdim: bool, of: Callable[..., Array]) -> Laid:
    if dim is None:
        return Laid(of(x.plain().reshape(-1)).astype(jnp.int32), ())
    array = of(x.array, axis=x.axis(dim), keepdims=keepdim).astype(jnp.int32)
    return x.same(array) if keepdim else without_axes(x, [dim % x.ndim], array)


@aten("any.default", "any.dim")
def any_of(x: Laid, dim: Dims = None, keepdim: bool = False) -> Laid:
    """Whether any value is true."""
    return reduce(x, dim, keepdim, jnp.any)


@aten("all.default", "all.dim")
def all_of(x: Laid, dim: Dims = None, keepdim: bool = False) -> Laid:
    """Whether all values are true."""
    return reduce(x, dim, keepdim, jnp.all)


@aten("prod.default", "prod.dim_int")
def product(x: Laid, dim: Dims = None, keepdim: bool = False) -> Laid:
    """Product over axes."""
    return reduce(x, dim, keepdim, jnp.prod)


@aten("var.correction", "var.dim", "var.default")
def variance(
    x: Laid, dim: Dims | bool = None, unbiased: Any = True, keepdim: bool = False, **options: Any
) -> Laid:
    """Variance over axes; the divisor is n - 1 unless told otherwise."""
    if isinstance(dim, bool):
        dim, unbiased = None, dim
    if not isinstance(unbiased, bool):
        raise ValueError(f"unbiased = {unbiased!r}; must be true or false")
    correction = options.get("correction", 1 if unbiased else 0)
    correction = 1 if correction is None else correction
    keepdim = options.get("keepdim", keepdim)

    def of(array: Array, *, axis: Any, keepdims: bool) -> Array:
        return in_float32(
            lambda a: jnp.var(a, axis=axis, keepdims=keepdims, ddof=correction), array
        )

    return reduce(x, dim, keepdim, of)


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

    def of(array: Array, *, axis: Any, keepdims: bool) -> Array:
        if order == 2:
            return jnp.sqrt(jnp.sum(jnp.square(array), axis=axis, keepdims=keepdims))
        powers = jnp.sum(jnp.abs(array) ** order, axis=axis, keepdims=keepdims)
        return powers ** (1 / order)

    return reduce(x, dim, keepdim, of)


@aten("cumsum.default")
def cumulative_sum(context: OperatorContext, x: Laid, dim: int, *, dtype: Any = None) -> Laid:
    """Sum of all values up to each place of an axis."""
    x = _typed(context, x, dtype)
    return x.same(jnp.cumsum(x.array, x.axis(dim)))


@aten("softmax.int", "_softmax.default")
def softmax(context: OperatorContext, x: Laid, dim: int, dtype: Any = None) -> Laid:
    """Exponentials over their sum along an axis, in float32."""
    axis = x.axis(dim)
    return _typed(context, x, dtype).same(in_float32(lambda a: jax.nn.softmax(a, axis), x.array))


@aten("log_softmax.int", "_log_softmax.default")
def log_softmax(context: OperatorContext, x: Laid, dim: int, dtype: Any = None) -> Laid:
    """Logarithm of the softmax, in float32."""
    axis = x.axis(dim)
    own = _typed(context, x, dtype)
    return own.same(in_float32(lambda a: jax.nn.log_softmax(a, axis), x.array))


@aten("logsumexp.default")
def log_sum_exp(x: Laid, dim: Dims, keepdim: bool = False) -> Laid:
    """Logarithm of the sum of exponentials over axes."""
    assert is_float(x), "the exponentials of whole numbers are no whole numbers"
    return reduce(x, dim, keepdim, jax.scipy.special.logsumexp)
