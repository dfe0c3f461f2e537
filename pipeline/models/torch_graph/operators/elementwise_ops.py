"""Elementwise operators: functions of one array, functions of arrays that broadcast, casts, and
draws of random numbers, each from the key of its node.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.graph import TypeOf
from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    TorchTensor,
    align,
    aten,
    broadcasting,
    cast_array,
    is_float,
    plain,
    to_tensor,
    valuewise,
)
from pipeline.models.torch_graph.operators.linear_algebra_ops import power_norm

# fmt: off
_SAME_NAMES = (
    jnp.acos, jnp.acosh, jnp.asin, jnp.asinh, jnp.atan, jnp.atanh, jnp.bitwise_not,
    jnp.ceil, jnp.cos, jnp.cosh, jnp.exp, jnp.exp2, jnp.expm1, jnp.floor, jnp.isfinite, jnp.isinf,
    jnp.isnan, jnp.log, jnp.log10, jnp.log1p, jnp.log2, jnp.logical_not, jnp.round, jnp.sin,
    jnp.sinh, jnp.sqrt, jnp.square, jnp.tan, jnp.tanh, jnp.trunc,
)
# fmt: on
"""Functions with the same name in ATen and jax.numpy."""


def _find_sign(x: Array) -> Array:
    """Return -1, 0 or 1, and 0 for NaN as in PyTorch, in the dtype of x; a bool as it is."""
    if x.dtype == jnp.bool_:
        return x
    return jnp.where(jnp.isnan(x), jnp.zeros_like(x), jnp.sign(x)) if is_float(x) else jnp.sign(x)


def _absolute(x: Array) -> Array:
    """Return |x|, whose gradient at 0 and NaN is 0."""
    if not is_float(x):
        return jnp.abs(x)
    return x * lax.stop_gradient(_find_sign(x))


def _compute_as_float(function: Callable[[Array], Array]) -> Callable[[Array], Array]:
    """Return the function, which computes whole numbers and bools in float32."""
    return lambda x: function(x if jnp.issubdtype(x.dtype, jnp.inexact) else x.astype(jnp.float32))


def _saturate(x: Array, low: float | None = None, high: float | None = None) -> Array:
    """Return x within bounds; values equal to a bound have no gradient, as in PyTorch 2.14
    (of `clamp`; 1 before)."""
    y = x if low is None else jnp.where(x <= low, low, x)
    return y if high is None else jnp.where(y >= high, high, y)


_FUNCTIONS: Mapping[str, Callable[..., Array]] = {
    **{function.__name__: function for function in _SAME_NAMES},
    "relu": jax.nn.relu,
    "abs": _absolute,
    "relu6": lambda x: _saturate(x, 0, 6),
    "silu": jax.nn.silu,
    "selu": jax.nn.selu,
    "gelu": lambda x, *, approximate="none": jax.nn.gelu(x, approximate=approximate == "tanh"),
    "mish": lambda x: x * jnp.tanh(jax.nn.softplus(x)),
    "leaky_relu": lambda x, negative_slope=0.01: jnp.where(x > 0, x, negative_slope * x),
    "hardswish": jax.nn.hard_swish,
    "hardsigmoid": lambda x: _saturate(x + 3, 0, 6) / 6,
    "hardtanh": lambda x, low=-1.0, high=1.0: _saturate(x, low, high),
    "sigmoid": _compute_as_float(jax.nn.sigmoid),
    **dict.fromkeys(("sign", "sgn"), _find_sign),
    "log_sigmoid": jax.nn.log_sigmoid,
    **dict.fromkeys(("clamp", "clip"), _saturate),
    "clamp_min": _saturate,
    "clamp_max": lambda x, high: _saturate(x, None, high),
    "rsqrt": _compute_as_float(lax.rsqrt),
    "reciprocal": lambda x: 1 / x,
    "neg": lambda x: -x,
    "nan_to_num": lambda x, nan=None, posinf=None, neginf=None: jnp.nan_to_num(
        x, nan=nan or 0.0, posinf=posinf, neginf=neginf
    ),
    "erf": jax.scipy.special.erf,
    "erfc": jax.scipy.special.erfc,
    "erfinv": jax.scipy.special.erfinv,
    "lgamma": jax.scipy.special.gammaln,
    "digamma": jax.scipy.special.digamma,
    "zero": lambda x: jnp.zeros_like(x),
    # Graphs change nothing in place, so copies aren't necessary.
    **dict.fromkeys(("alias", "lift_fresh_copy", "positive"), lambda x: x),
    **dict.fromkeys(("clone", "contiguous"), lambda x, memory_format=None: x),
    "detach": lax.stop_gradient,
}
for _name, _function in _FUNCTIONS.items():
    _kind = _name if _name in ("relu", "relu6", "gelu") else ""
    aten(f"{_name}.default", kind=_kind)(valuewise(_function))


@aten("_weight_norm.default")
@plain
def normalise_weight(direction: Any, length: Any, dim: int = 0) -> Any:
    """Return weights of a direction and a length (Salimans and Kingma 2016, eq. 2)."""
    axes = tuple(axis for axis in range(direction.ndim) if axis != dim % direction.ndim)
    return direction * (length / power_norm(direction, 2, None if dim == -1 else axes, True))


@aten("elu.default")
@valuewise
def elu(x: Array, alpha: float = 1.0, scale: float = 1.0, input_scale: float = 1.0) -> Array:
    """Return scale * x if x > 0, else scale * alpha * (exp(x * input_scale) - 1)."""
    negative = jnp.where(x > 0, 0, x)
    return scale * jnp.where(x > 0, x, alpha * jnp.expm1(negative * input_scale))


@aten("softplus.default")
@valuewise
def softplus(x: Array, beta: float = 1.0, threshold: float = 20.0) -> Array:
    """Return log(1 + exp(beta * x)) / beta, or x if beta * x is above the threshold."""
    scaled = x * beta
    return jnp.where(scaled > threshold, x, jax.nn.softplus(scaled) / beta)


@aten("prelu.default")
def prelu(x: TorchTensor, weight: TorchTensor) -> TorchTensor:
    """Return x if x > 0, else x times the slope of its channel (axis 1)."""
    slope = weight.array
    if slope.size > 1:
        sizes = [1] * x.ndim
        sizes[x.axis(1)] = slope.size
        slope = slope.reshape(sizes)
    return x.with_array(jnp.where(x.array > 0, x.array, slope.astype(x.dtype) * x.array))


@aten("glu.default")
def glu(x: TorchTensor, dim: int = -1) -> TorchTensor:
    """Return the first half of an axis times the sigmoid of the second."""
    first, second = jnp.split(x.array, 2, x.axis(dim))
    return x.with_array(first * jax.nn.sigmoid(second))


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
_register(jnp.bitwise_xor, "bitwise_xor.Tensor", "bitwise_xor.Scalar")
_register(jnp.hypot, "hypot.default")
_register(jnp.logaddexp, "logaddexp.default")


@aten("clamp.Tensor")
def clamp_by_tensors(
    x: TorchTensor, low: TorchTensor | None = None, high: TorchTensor | None = None
) -> TorchTensor:
    """Limit values to bounds, each of which may be missing."""
    operands = [operand for operand in (x, low, high) if operand is not None]
    arrays, order = align(operands)
    y, *bounds = arrays
    if low is not None:
        y = jnp.maximum(y, bounds.pop(0))
    if high is not None:
        y = jnp.minimum(y, bounds.pop(0))
    return TorchTensor(y, order)


@aten("pow.Tensor_Scalar", "pow.Tensor_Tensor", "pow.Scalar")
@broadcasting
def power(x: Any, exponent: Any) -> Array:
    """Return x ** exponent.

    Whole exponents of at most 16 are computed as products, whose gradient is finite at 0.
    """
    if isinstance(exponent, int | float) and exponent == int(exponent) and abs(exponent) <= 16:
        return lax.integer_pow(x, int(exponent))
    return jnp.power(x, exponent)


def _scale(x: Any, alpha: float) -> Any:
    return x if alpha == 1 else alpha * x


aten("add.Tensor", "add.Scalar")(
    broadcasting(lambda x, other, alpha=1: jnp.add(x, _scale(other, alpha)))
)
aten("sub.Tensor", "sub.Scalar")(
    broadcasting(lambda x, other, alpha=1: jnp.subtract(x, _scale(other, alpha)))
)
aten("rsub.Scalar", "rsub.Tensor")(
    broadcasting(lambda x, other, alpha=1: jnp.subtract(other, _scale(x, alpha)))
)


@aten("div.Tensor", "div.Scalar", "div.Tensor_mode", "div.Scalar_mode")
@broadcasting
def divide(x: Any, other: Any, *, rounding_mode: str | None = None) -> Array:
    """Return x / other, rounded towards zero by `trunc` or down by `floor`."""
    if rounding_mode == "floor":
        return jnp.floor_divide(x, other)
    if rounding_mode is None or is_float(jnp.asarray(x)) or is_float(jnp.asarray(other)):
        quotient = jnp.true_divide(x, other)
        return quotient if rounding_mode is None else jnp.trunc(quotient)
    # Large whole numbers aren't exact as floats.
    return jnp.floor_divide(x - jnp.fmod(x, other), other)


aten("lerp.Scalar", "lerp.Tensor")(
    broadcasting(lambda start, end, weight: start + weight * (end - start))
)
aten("addcmul.default")(
    broadcasting(lambda x, first, second, *, value=1: x + value * first * second)
)
aten("where.self", "where.ScalarOther", "where.ScalarSelf", "where.Scalar")(
    broadcasting(lambda condition, x, other: jnp.where(condition, x, other))
)
aten("masked_fill.Scalar", "masked_fill.Tensor")(
    broadcasting(lambda x, mask, value: jnp.where(mask, jnp.asarray(value, x.dtype), x))
)


@aten("fill.Scalar", "fill.Tensor")
def fill(x: TorchTensor, value: Any) -> TorchTensor:
    """Return an array with the shape and dtype of x, all of whose values are `value`."""
    number = value.array if isinstance(value, TorchTensor) else value
    return x.with_array(jnp.full_like(x.array, number))


@aten("copy.default")
def copy(x: TorchTensor, source: TorchTensor, non_blocking: bool = False) -> TorchTensor:
    """Return the source, broadcast to the shape of x and cast to its dtype."""
    (_, source_array), _ = align((x, source))
    return x.with_array(cast_array(jnp.broadcast_to(source_array, x.array.shape), x.dtype))


@aten("to.dtype", "_to_copy.default", "to.dtype_layout", "type_as.default", "to.device")
def cast(
    context: OperatorContext, x: TorchTensor, *args: Any, dtype: Any = None, **_: Any
) -> TorchTensor:
    """Cast x to the dtype of the first tensor or `TypeOf` among the arguments, if there is one."""
    for argument in (dtype, *args):
        if isinstance(argument, TorchTensor):
            return x.with_array(cast_array(x.array, argument.dtype))
        if isinstance(argument, TypeOf):
            dtype = context.type_of(argument)
            is_int64 = argument.name == "int64"
            return x.with_array(cast_array(x.array, dtype, is_int64=is_int64))
    return x


@aten("scalar_tensor.default")
def scalar_tensor(context: OperatorContext, value: float, *, dtype: Any = None) -> TorchTensor:
    """Return a number as a tensor without axes."""
    return TorchTensor(jnp.asarray(value, context.type_of(dtype)), ())


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


def _register_draw(name: str, sample: Callable[..., Array]) -> None:
    """Register operators that draw from a distribution: an array of a shape, or of x's shape."""

    @aten(f"{name}.default", draws=True)
    def make(context: OperatorContext, size: Sequence[int], *, dtype: Any = None) -> TorchTensor:
        return to_tensor(sample(context.draw_key(), tuple(size), context.type_of(dtype)))

    @aten(f"{name}_like.default", draws=True)
    def make_like(context: OperatorContext, x: TorchTensor, *, dtype: Any = None) -> TorchTensor:
        draws = sample(context.draw_key(), x.array.shape, context.type_of(dtype, x.dtype))
        return x.with_array(draws)


_register_draw("rand", jax.random.uniform)
_register_draw("randn", jax.random.normal)


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
