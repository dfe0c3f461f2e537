"""Operators that draw random numbers, each from the key of its node."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.models.torch_graph.operator_table import OperatorContext, TorchTensor, aten, to_tensor


def drop_values(x: Array, rate: float, key: Array, shape: tuple[int, ...] | None = None) -> Array:
    """Set values to zero with the probability `rate`, and divide the others by 1 - rate.

    The random mask has the shape `shape`, by default x's. Raises ValueError for a rate
    outside of 0 to 1.
    """
    if not 0 <= rate <= 1:
        raise ValueError(f"a dropout rate of {rate}; must be 0 to 1")
    if rate == 1:
        return jnp.zeros_like(x)
    mask = jax.random.bernoulli(key, 1 - rate, x.shape if shape is None else shape)
    return jnp.where(mask, x / (1 - rate), jnp.zeros_like(x))


@aten("dropout.default", draws=True)
def dropout(context: OperatorContext, x: TorchTensor, p: float, train: bool) -> TorchTensor:
    """Set values to zero with the probability p, and divide the others by 1 - p."""
    if not train or p == 0:
        return x
    x = context.to_drawing_order(x)
    return x.with_array(drop_values(x.array, p, context.draw_key()))


@aten("native_dropout.default", draws=True)
def native_dropout(
    context: OperatorContext, x: TorchTensor, p: float, train: bool | None
) -> tuple[TorchTensor | None, ...]:
    """Apply dropout. The operator's second result, the mask, isn't returned."""
    return (dropout(context, x, p, train is not False),)


@aten("feature_dropout.default", draws=True)
def feature_dropout(context: OperatorContext, x: TorchTensor, p: float, train: bool) -> TorchTensor:
    """Set a sample's channels to zero with the probability p, and divide the others by 1 - p."""
    if not train or p == 0:
        return x
    x = context.to_drawing_order(x)
    sizes = tuple(x.shape[number] if number in (0, 1) else 1 for number in x.order)
    return x.with_array(drop_values(x.array, p, context.draw_key(), sizes))


@aten("bernoulli.p", draws=True)
def bernoulli(context: OperatorContext, x: TorchTensor, p: float = 0.5) -> TorchTensor:
    """Draw 1 with probability p, else 0, in the shape of x."""
    return x.with_array(jax.random.bernoulli(context.draw_key(), p, x.array.shape).astype(x.dtype))


@aten("bernoulli.default", "bernoulli.Tensor", draws=True)
def bernoulli_of(
    context: OperatorContext, x: TorchTensor, p: TorchTensor | None = None
) -> TorchTensor:
    """Draw 1 with the probability of each value, else 0."""
    probabilities = x if p is None else p
    draws = jax.random.bernoulli(context.draw_key(), probabilities.array)
    return probabilities.with_array(draws.astype(x.dtype))


def _register(name: str, sample: Callable[..., Array]) -> None:
    """Register operators that draw from a distribution: an array of a shape, or of x's shape."""

    @aten(f"{name}.default", draws=True)
    def make(context: OperatorContext, size: Sequence[int], *, dtype: Any = None) -> TorchTensor:
        return to_tensor(sample(context.draw_key(), tuple(size), context.type_of(dtype)))

    @aten(f"{name}_like.default", draws=True)
    def make_like(context: OperatorContext, x: TorchTensor, *, dtype: Any = None) -> TorchTensor:
        draws = sample(context.draw_key(), x.array.shape, context.type_of(dtype, x.dtype))
        return x.with_array(draws)


_register("rand", jax.random.uniform)
_register("randn", jax.random.normal)


@aten("uniform.default", draws=True)
def uniform(
    context: OperatorContext, x: TorchTensor, low: float = 0.0, high: float = 1.0
) -> TorchTensor:
    """Draw uniform numbers from [low, high) in the shape of x."""
    return x.with_array(jax.random.uniform(context.draw_key(), x.array.shape, x.dtype, low, high))


@aten("normal_functional.default", draws=True)
def normal(
    context: OperatorContext, x: TorchTensor, mean: float = 0.0, std: float = 1.0
) -> TorchTensor:
    """Draw normal numbers in the shape of x."""
    return x.with_array(mean + std * jax.random.normal(context.draw_key(), x.array.shape, x.dtype))


@aten("exponential.default", draws=True)
def exponential(context: OperatorContext, x: TorchTensor, rate: float = 1.0) -> TorchTensor:
    """Draw from an exponential distribution in the shape of x."""
    return x.with_array(jax.random.exponential(context.draw_key(), x.array.shape, x.dtype) / rate)


@aten("randperm.default", draws=True)
def permutation(context: OperatorContext, n: int, *, dtype: Any = None) -> TorchTensor:
    """Draw an order of the numbers below n."""
    draws = jax.random.permutation(context.draw_key(), n)
    return to_tensor(draws.astype(context.type_of(dtype, jnp.int32)))


@aten("randint.default", "randint.low", draws=True)
def integers(context: OperatorContext, *bounds: Any, dtype: Any = None) -> TorchTensor:
    """Draw whole numbers below a bound, or from a first to below a second, in a shape."""
    *limits, size = bounds
    low, high = (0, *limits)[-2:]
    draws = jax.random.randint(context.draw_key(), tuple(size), low, high)
    return to_tensor(draws.astype(context.type_of(dtype, jnp.int32)))


@aten("randint_like.default", "randint_like.low_dtype", draws=True)
def integers_like(
    context: OperatorContext, x: TorchTensor, *bounds: int, dtype: Any = None
) -> TorchTensor:
    """Draw whole numbers below a bound, or from a first to below a second, in the shape of x."""
    low, high = (0, *bounds)[-2:]
    draws = jax.random.randint(context.draw_key(), x.array.shape, low, high)
    return x.with_array(draws.astype(context.type_of(dtype, x.dtype)))
