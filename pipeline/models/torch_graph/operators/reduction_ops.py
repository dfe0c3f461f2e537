"""Reductions over axes, and softmax, which is computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial, wraps
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    aten,
    cast_array,
    compute_in_float32,
    is_float,
)
from pipeline.models.torch_graph.operators.linear_algebra_ops import power_norm
from pipeline.models.torch_graph.tensor import TorchTensor, drop_axes

Dims = int | Sequence[int] | None


def reduce(x: TorchTensor, dim: Dims, keepdim: bool, function: Callable[..., Array]) -> TorchTensor:
    """Reduce the axes `dim`, by default all, by a function such as `jnp.sum`."""
    dims = (dim,) if isinstance(dim, int) else tuple(dim or range(x.ndim))
    numbers = [number % x.ndim for number in dims] if x.ndim else []
    array = function(x.array, axis=x.axes(numbers), keepdims=keepdim)
    return x.with_array(array) if keepdim else drop_axes(x, numbers, array)


def _cast(context: OperatorContext, x: TorchTensor, dtype: Any) -> TorchTensor:
    return x.with_array(cast_array(x.array, context.type_of(dtype, x.dtype)))


def _register(function: Callable[..., Array], *names: str) -> None:
    @aten(*names)
    def apply(
        context: OperatorContext,
        x: TorchTensor,
        dim: Dims = None,
        keepdim: bool = False,
        *,
        dtype: Any = None,
    ) -> TorchTensor:
        return reduce(_cast(context, x, dtype), dim, keepdim, function)


_register(jnp.mean, "mean.dim", "mean.default")
_register(jnp.sum, "sum.dim_IntList", "sum.default")
_register(jnp.prod, "prod.default", "prod.dim_int")
_register(jnp.max, "amax.default", "max.default")
_register(jnp.min, "amin.default", "min.default")
_register(jnp.any, "any.default", "any.dim", "any.dims")
_register(jnp.all, "all.default", "all.dim", "all.dims")


def _register_extreme(name: str, find_index: Callable[..., Array]) -> None:
    """Register `argmax`, and `max` along an axis with the indices; or both for `min`."""

    @aten(f"arg{name}.default")
    def find(x: TorchTensor, dim: int | None = None, keepdim: bool = False) -> TorchTensor:
        if dim is None or x.ndim == 0:
            return TorchTensor(find_index(x.plain().reshape(-1)).astype(jnp.int32), ())
        array = find_index(x.array, axis=x.axis(dim), keepdims=keepdim).astype(jnp.int32)
        return x.with_array(array) if keepdim else drop_axes(x, [dim % x.ndim], array)

    @aten(f"{name}.dim")
    def reduce_axis(
        x: TorchTensor, dim: int, keepdim: bool = False
    ) -> tuple[TorchTensor, TorchTensor]:
        if x.ndim == 0:
            return x, find(x)
        # Of equal values only the one at the index has a gradient.
        places = find(x, dim, True)
        values = x.with_array(jnp.take_along_axis(x.array, places.array, x.axis(dim)))
        if keepdim:
            return values, places
        removed = [dim % x.ndim]
        axes = x.axes(removed)
        values, places = (
            drop_axes(y, removed, jnp.squeeze(y.array, axes)) for y in (values, places)
        )
        return values, places


_register_extreme("max", jnp.argmax)
_register_extreme("min", jnp.argmin)


@aten("var.correction", "var.dim", "var.default")
def variance(
    x: TorchTensor,
    dim: Dims | bool = None,
    unbiased: Any = True,
    keepdim: bool = False,
    *,
    correction: Any = None,
) -> TorchTensor:
    """Return the variance over axes: the sum of squares divided by n - correction, by default 1.

    Some overloads have the boolean `unbiased`, a correction of 1 or 0, as their first argument.
    """
    if isinstance(dim, bool):
        unbiased = dim
        dim = None
    if not isinstance(unbiased, bool):
        raise ValueError(f"unbiased = {unbiased!r}; must be true or false")
    if correction is None:
        correction = 1 if unbiased else 0

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        compute_variance = partial(jnp.var, axis=axis, keepdims=keepdims, ddof=correction)
        return compute_in_float32(compute_variance, array)

    return reduce(x, dim, keepdim, compute)


@aten("std.correction", "std.dim", "std.default")
@wraps(variance, assigned=())
def deviation(*args: Any, **kwargs: Any) -> TorchTensor:
    """Return the standard deviation over axes."""
    var = variance(*args, **kwargs)
    # The gradient of equal values is 0, as PyTorch's is.
    is_zero = var.array == 0
    root = jnp.sqrt(jnp.where(is_zero, jnp.ones_like(var.array), var.array))
    return var.with_array(jnp.where(is_zero, jnp.zeros_like(root), root))


@aten("var_mean.correction", "var_mean.dim", "var_mean.default")
@wraps(variance, assigned=())
def variance_and_mean(
    x: TorchTensor,
    dim: Dims | bool = None,
    unbiased: Any = True,
    keepdim: bool = False,
    **options: Any,
) -> tuple[TorchTensor, TorchTensor]:
    """Return the variance and the mean over axes."""
    mean = reduce(x, None if isinstance(dim, bool) else dim, keepdim, jnp.mean)
    return variance(x, dim, unbiased, keepdim, **options), mean


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim", "norm.Scalar")
def vector_norm(
    x: TorchTensor, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> TorchTensor:
    """Return the norm over axes: sum(|x| ** order) ** (1 / order)."""
    order = 2 if order is None else order

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        return power_norm(array, order, axis, keepdims)

    return reduce(x, dim, keepdim, compute)


@aten("cumsum.default")
def cumulative_sum(
    context: OperatorContext, x: TorchTensor, dim: int, *, dtype: Any = None
) -> TorchTensor:
    """Return the sum of all values up to each index of an axis."""
    return x.with_array(jnp.cumsum(_cast(context, x, dtype).array, x.axis(dim)))


@aten("cumprod.default")
def cumulative_product(
    context: OperatorContext, x: TorchTensor, dim: int, *, dtype: Any = None
) -> TorchTensor:
    """Return the product of all values up to each index of an axis."""
    return x.with_array(jnp.cumprod(_cast(context, x, dtype).array, x.axis(dim)))


@aten("logcumsumexp.default")
def cumulative_log_sum(x: TorchTensor, dim: int) -> TorchTensor:
    """Return the logarithm of the sum of exponentials up to each index of an axis."""
    return x.with_array(lax.cumlogsumexp(x.array, x.axis(dim) if x.ndim else 0))


def _register_softmax(function: Callable[[Array, int], Array], *names: str) -> None:
    """Register a function of an array and an axis. It is computed in float32."""

    @aten(*names)
    def apply(context: OperatorContext, x: TorchTensor, dim: int, dtype: Any = None) -> TorchTensor:
        array = _cast(context, x, dtype).array
        return x.with_array(compute_in_float32(lambda a: function(a, x.axis(dim)), array))


_register_softmax(jax.nn.softmax, "softmax.int", "_softmax.default")
_register_softmax(jax.nn.log_softmax, "log_softmax.int", "_log_softmax.default")


@aten("logsumexp.default")
def log_sum_exp(x: TorchTensor, dim: Dims, keepdim: bool = False) -> TorchTensor:
    """Return the logarithm of the sum of exponentials over axes."""
    assert is_float(x), "exponentials need floating-point numbers"
    return reduce(x, dim, keepdim, jax.scipy.special.logsumexp)
