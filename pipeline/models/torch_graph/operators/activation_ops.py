"""Operators of one array, value by value: activations and functions."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.laid import Laid
from pipeline.models.torch_graph.operator_table import aten


def _each(*names: str, of: Callable[[Array], Array], kind: str = "") -> None:
    """Register a function of one array."""

    @aten(*(name if "." in name else f"{name}.default" for name in names), kind=kind)
    def apply(x: Laid) -> Laid:
        return x.same(of(x.array))


_each("relu", of=jax.nn.relu, kind="relu")
_each("relu6", of=jax.nn.relu6, kind="relu6")
_each("silu", of=jax.nn.silu)
_each("mish", of=lambda x: x * jnp.tanh(jax.nn.softplus(x)))
_each("hardswish", of=jax.nn.hard_swish)
_each("hardsigmoid", of=jax.nn.hard_sigmoid)
_each("sigmoid", of=jax.nn.sigmoid)
_each("log_sigmoid", of=jax.nn.log_sigmoid)
_each("tanh", of=jnp.tanh)
_each("selu", of=jax.nn.selu)
_each("exp", of=jnp.exp)
_each("expm1", of=jnp.expm1)
_each("log", of=jnp.log)
_each("log1p", of=jnp.log1p)
_each("log2", of=jnp.log2)
_each("sqrt", of=jnp.sqrt)
_each("rsqrt", of=lax.rsqrt)
_each("square", of=jnp.square)
_each("reciprocal", of=lambda x: 1 / x)
_each("abs", of=jnp.abs)
_each("neg", of=jnp.negative)
_each("sign", of=jnp.sign)
_each("sin", of=jnp.sin)
_each("cos", of=jnp.cos)
_each("tan", of=jnp.tan)
_each("atan", of=jnp.arctan)
_each("erf", of=jax.scipy.special.erf)
_each("floor", of=jnp.floor)
_each("ceil", of=jnp.ceil)
_each("round", of=jnp.round)
_each("logical_not", of=jnp.logical_not)
_each("bitwise_not", of=jnp.bitwise_not)
_each("isnan", of=jnp.isnan)
_each("isinf", of=jnp.isinf)
_each("isfinite", of=jnp.isfinite)
_each("detach", of=lax.stop_gradient)


@aten("alias.default", "lift_fresh_copy.default", "positive.default")
def identity(x: Laid) -> Laid:
    """The array itself: nothing is computed in place, so it needs no copy."""
    return x


@aten("clone.default", "contiguous.default")
def copy_of(x: Laid, memory_format: Any = None) -> Laid:
    """The array itself, whatever its order in memory is to be."""
    return x


@aten("gelu.default", kind="gelu")
def gelu(x: Laid, *, approximate: str = "none") -> Laid:
    """Gaussian error linear unit: exact, or `tanh`."""
    return x.same(jax.nn.gelu(x.array, approximate=approximate == "tanh"))


@aten("leaky_relu.default")
def leaky_relu(x: Laid, negative_slope: float = 0.01) -> Laid:
    """x where positive, else the slope times x."""
    return x.same(jax.nn.leaky_relu(x.array, negative_slope))


@aten("elu.default")
def elu(x: Laid, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Laid:
    """scale * x where positive, else scale * alpha * (exp(x * input_scale) - 1)."""
    a = x.array
    safe = jnp.where(a > 0, 0, a)
    return x.same(scale * jnp.where(a > 0, a, alpha * jnp.expm1(safe * input_scale)))


@aten("softplus.default")
def softplus(x: Laid, beta: float = 1.0, threshold: float = 20.0) -> Laid:
    """log(1 + exp(beta x)) / beta, and x itself above the threshold."""
    scaled = x.array * beta
    return x.same(jnp.where(scaled > threshold, x.array, jax.nn.softplus(scaled) / beta))


@aten("hardtanh.default")
def hardtanh(x: Laid, low: float = -1.0, high: float = 1.0) -> Laid:
    """x between two bounds."""
    return x.same(jnp.clip(x.array, low, high))


@aten("clamp.default", "clip.default")
def clamp(x: Laid, low: float | None = None, high: float | None = None) -> Laid:
    """x between two bounds, either of which may be missing."""
    return x.same(jnp.clip(x.array, low, high))


@aten("clamp_min.default")
def clamp_min(x: Laid, low: float) -> Laid:
    """x, or the bound where that is larger."""
    return x.same(jnp.maximum(x.array, low))


@aten("clamp_max.default")
def clamp_max(x: Laid, high: float) -> Laid:
    """x, or the bound where that is smaller."""
    return x.same(jnp.minimum(x.array, high))


@aten("prelu.default")
def prelu(x: Laid, weight: Laid) -> Laid:
    """x where positive, else x times a slope for each channel (axis 1)."""
    slope = weight.array
    if slope.size > 1:
        sizes = [1] * x.ndim
        sizes[x.axis(1)] = slope.size
        slope = slope.reshape(sizes)
    return x.same(jnp.where(x.array > 0, x.array, slope.astype(x.dtype) * x.array))


@aten("glu.default")
def glu(x: Laid, dim: int = -1) -> Laid:
    """First half of an axis times the sigmoid of the second."""
    first, second = jnp.split(x.array, 2, x.axis(dim))
    return x.same(first * jax.nn.sigmoid(second))
