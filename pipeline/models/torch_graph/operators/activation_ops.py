"""Operators of one array: activations and other functions, value by value."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.laid import Laid
from pipeline.models.torch_graph.operator_table import aten, valuewise

# fmt: off
_SAME_NAMES = (
    "abs", "bitwise_not", "ceil", "cos", "exp", "expm1", "floor", "isfinite", "isinf", "isnan",
    "log", "log1p", "log2", "logical_not", "round", "sign", "sin", "sqrt", "square", "tan", "tanh",
)
# fmt: on
"""Functions that ATen and jax.numpy call alike."""
_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    **{name: getattr(jnp, name) for name in _SAME_NAMES},
    "relu": jax.nn.relu,
    "relu6": jax.nn.relu6,
    "silu": jax.nn.silu,
    "selu": jax.nn.selu,
    "gelu": lambda x, *, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "leaky_relu": lambda x, negative_slope=0.01: jax.nn.leaky_relu(x, negative_slope),
    "hardswish": jax.nn.hard_swish,
    "hardsigmoid": jax.nn.hard_sigmoid,
    "hardtanh": lambda x, low=-1.0, high=1.0: jnp.clip(x, low, high),
    "sigmoid": jax.nn.sigmoid,
    "log_sigmoid": jax.nn.log_sigmoid,
    "clamp": lambda x, low=None, high=None: jnp.clip(x, low, high),
    "clip": lambda x, low=None, high=None: jnp.clip(x, low, high),
    "clamp_min": lambda x, low: jnp.maximum(x, low),
    "clamp_max": lambda x, high: jnp.minimum(x, high),
    "rsqrt": lambda x: lax.rsqrt(x),
    "reciprocal": lambda x: 1 / x,
    "neg": lambda x: -x,
    "atan": jnp.arctan,
    "erf": jax.scipy.special.erf,
    "zero": lambda x: jnp.zeros_like(x),
    # Nothing is computed in place, so no array needs a copy.
    "alias": lambda x: x,
    "lift_fresh_copy": lambda x: x,
    "positive": lambda x: x,
    "clone": lambda x, memory_format=None: x,
    "contiguous": lambda x, memory_format=None: x,
    "detach": lax.stop_gradient,
}
for _name, _function in _FUNCTIONS.items():
    _kind = _name if _name in ("relu", "relu6", "gelu") else ""
    aten(f"{_name}.default", kind=_kind)(valuewise(_function))


@aten("elu.default")
@valuewise
def elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    """scale * x where positive, else scale * alpha * (exp(x * input_scale) - 1)."""
    safe = jnp.where(x > 0, 0, x)
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(safe * input_scale))


@aten("softplus.default")
@valuewise
def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """log(1 + exp(beta x)) / beta, and x itself above the threshold."""
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jax.nn.softplus(scaled) / beta)


@aten("nan_to_num.default")
@valuewise
def nan_to_num(
    x: Array, nan: float | None = None, posinf: float | None = None, neginf: float | None = None
) -> Array:
    """x with NaN and infinities replaced."""
    return jnp.nan_to_num(x, nan=nan or 0.0, posinf=posinf, neginf=neginf)


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
