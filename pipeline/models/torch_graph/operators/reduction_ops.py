"""Reductions over axes, softmax and normalizations. The last two are computed in float32."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from functools import partial, wraps
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.modules.batch_norm import (
    NormSettings,
    Statistics,
    compute_statistics,
    normalise,
    normalise_by_batch,
)
from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    aten,
    cast_array,
    compute_in_float32,
    is_float,
    pack_result,
)
from pipeline.models.torch_graph.tensor import TorchTensor, drop_axes, to_tensor

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
_register(jnp.any, "any.default", "any.dim")
_register(jnp.all, "all.default", "all.dim")


def _register_extreme(
    name: str, extreme: Callable[..., Array], find_index: Callable[..., Array]
) -> None:
    """Register `argmax`, and `max` along an axis with the indices; or both for `min`."""

    @aten(f"arg{name}.default")
    def find(x: TorchTensor, dim: int | None = None, keepdim: bool = False) -> TorchTensor:
        if dim is None:
            return TorchTensor(find_index(x.plain().reshape(-1)).astype(jnp.int32), ())
        array = find_index(x.array, axis=x.axis(dim), keepdims=keepdim).astype(jnp.int32)
        return x.with_array(array) if keepdim else drop_axes(x, [dim % x.ndim], array)

    @aten(f"{name}.dim")
    def reduce_axis(
        x: TorchTensor, dim: int, keepdim: bool = False
    ) -> tuple[TorchTensor, TorchTensor]:
        return reduce(x, dim, keepdim, extreme), find(x, dim, keepdim)


_register_extreme("max", jnp.max, jnp.argmax)
_register_extreme("min", jnp.min, jnp.argmin)


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
    return var.with_array(jnp.sqrt(var.array))


@aten("linalg_vector_norm.default", "norm.ScalarOpt_dim")
def vector_norm(
    x: TorchTensor, order: float = 2, dim: Dims = None, keepdim: bool = False, *, dtype: Any = None
) -> TorchTensor:
    """Return the norm over axes: sum(|x| ** order) ** (1 / order)."""
    order = 2 if order is None else order

    def compute(array: Array, *, axis: Any, keepdims: bool) -> Array:
        if order == 2:
            return jnp.sqrt(jnp.sum(jnp.square(array), axis=axis, keepdims=keepdims))
        powers = jnp.sum(jnp.abs(array) ** order, axis=axis, keepdims=keepdims)
        return powers ** (1 / order)

    return reduce(x, dim, keepdim, compute)


@aten("cumsum.default")
def cumulative_sum(
    context: OperatorContext, x: TorchTensor, dim: int, *, dtype: Any = None
) -> TorchTensor:
    """Return the sum of all values up to each index of an axis."""
    return x.with_array(jnp.cumsum(_cast(context, x, dtype).array, x.axis(dim)))


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


class NormResult(NamedTuple):
    """Result of a batch norm in training, and the new running statistics."""

    y: TorchTensor
    mean: Array
    var: Array


@dataclass(frozen=True)
class BatchNormSettings:
    """Settings of batch norm, in ATen's order.

    For instance norm, `training` is whether the statistics of each sample are used.
    """

    training: bool
    momentum: float
    eps: float
    cudnn_enabled: bool = True


@aten("batch_norm.default", kind="batch_norm", full_weights=True, settings=BatchNormSettings)
def batch_norm(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    running_mean: TorchTensor | None,
    running_var: TorchTensor | None,
    settings: BatchNormSettings,
) -> TorchTensor | NormResult:
    """Normalize each channel (axis 1) by the batch in training, else by the running statistics.

    In training, running statistics move by `momentum` to the batch's mean and unbiased variance.
    """
    channel = x.axis(1)
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    norm = NormSettings(axes, settings.eps, str(x.dtype), None, 1)
    channels = x.shape[1]
    scale = jnp.ones(channels, jnp.float32) if weight is None else weight.array
    shift = jnp.zeros(channels, jnp.float32) if bias is None else bias.array
    if not settings.training and running_mean is not None and running_var is not None:
        running = Statistics(
            running_mean.array, jnp.zeros_like(running_mean.array), running_var.array
        )
        return x.with_array(normalise(norm, x.array, running, scale, shift))
    statistics = compute_statistics(lax.stop_gradient(x.array), norm)
    y = x.with_array(normalise_by_batch(norm, x.array, statistics, scale, shift))
    if running_mean is None or running_var is None or not settings.training:
        return y
    num_values = x.array.size // channels
    unbiased = statistics.var * (num_values / max(num_values - 1, 1))
    momentum = settings.momentum
    return NormResult(
        y,
        (1 - momentum) * running_mean.array + momentum * statistics.mean,
        (1 - momentum) * running_var.array + momentum * unbiased,
    )


aten(
    "_native_batch_norm_legit_no_training.default",
    kind="batch_norm",
    full_weights=True,
    settings=partial(BatchNormSettings, False),
)(pack_result(batch_norm))


@aten(
    "_native_batch_norm_legit_functional.default",
    kind="batch_norm",
    full_weights=True,
    settings=BatchNormSettings,
)
def batch_norm_functional(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    running_mean: TorchTensor,
    running_var: TorchTensor,
    settings: BatchNormSettings,
) -> tuple[TorchTensor | None, ...]:
    """Normalize each channel by the batch. Results 3 and 4 are the new running statistics."""
    settings = replace(settings, training=True)
    result = batch_norm(x, weight, bias, running_mean, running_var, settings)
    assert isinstance(result, NormResult)
    return result.y, None, None, to_tensor(result.mean), to_tensor(result.var)


@aten("layer_norm.default", kind="layer_norm", full_weights=True)
def layer_norm(
    x: TorchTensor,
    normalized_shape: Sequence[int],
    weight: TorchTensor | None = None,
    bias: TorchTensor | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> TorchTensor:
    """Normalize each sample over its last axes."""
    numbers = range(x.ndim - len(normalized_shape), x.ndim)
    if x.shape[numbers.start :] != tuple(normalized_shape):
        raise ValueError(f"layer norm over {tuple(normalized_shape)} of shape {x.shape}")
    y = _standardise(x.array.astype(jnp.float32), x.axes(numbers), eps)
    return x.with_array(_scale_and_shift(x, y, weight, bias, numbers))


aten("native_layer_norm.default", kind="layer_norm", full_weights=True)(pack_result(layer_norm))


def _standardise(x: Array, axes: Sequence[int], eps: float) -> Array:
    """Subtract the mean over some axes, and divide by the standard deviation."""
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + eps)


@aten("rms_norm.default", kind="layer_norm", full_weights=True)
def rms_norm(
    x: TorchTensor,
    normalized_shape: Sequence[int],
    weight: TorchTensor | None = None,
    eps: float | None = None,
) -> TorchTensor:
    """Divide each sample by the root of the mean of squares over its last axes."""
    numbers = range(x.ndim - len(normalized_shape), x.ndim)
    array = x.array.astype(jnp.float32)
    eps = float(jnp.finfo(jnp.float32).eps) if eps is None else eps
    y = array * lax.rsqrt(jnp.square(array).mean(x.axes(numbers), keepdims=True) + eps)
    return x.with_array(_scale_and_shift(x, y, weight, None, numbers))


@aten("group_norm.default", kind="group_norm", full_weights=True)
def group_norm(
    x: TorchTensor,
    num_groups: int,
    weight: TorchTensor | None = None,
    bias: TorchTensor | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> TorchTensor:
    """Normalize each sample over its positions and each group of channels (axis 1)."""
    order = (0, *range(2, x.ndim), 1)
    ordered = TorchTensor(x.transpose(order), order)
    *sizes, channels = ordered.array.shape
    if num_groups < 1 or channels % num_groups:
        raise ValueError(f"{num_groups} groups of {channels} channels")
    grouped = ordered.array.astype(jnp.float32).reshape((*sizes, num_groups, -1))
    y = _standardise(grouped, (*range(1, x.ndim - 1), x.ndim), eps).reshape((*sizes, channels))
    return ordered.with_array(_scale_and_shift(ordered, y, weight, bias, [1]))


@aten("instance_norm.default", full_weights=True, settings=BatchNormSettings)
def instance_norm(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    running_mean: TorchTensor | None,
    running_var: TorchTensor | None,
    settings: BatchNormSettings,
) -> TorchTensor:
    """Normalize each channel of each sample over its positions."""
    if not settings.training or running_mean is not None:
        raise ValueError("instance norm must have no running statistics")
    return group_norm(x, x.shape[1], weight, bias, settings.eps)


def _scale_and_shift(
    x: TorchTensor,
    y: Array,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    numbers: Sequence[int],
) -> Array:
    """Return y * weight + bias in the dtype of x; `numbers` are PyTorch's axes of the weight."""
    if weight is not None:
        y = y * _broadcast_weight(x, weight, numbers)
    if bias is not None:
        y = y + _broadcast_weight(x, bias, numbers)
    return y.astype(x.dtype)


def _broadcast_weight(x: TorchTensor, weight: TorchTensor, numbers: Sequence[int]) -> Array:
    array = weight.transpose([numbers.index(number) for number in x.order if number in numbers])
    sizes = [x.shape[number] if number in numbers else 1 for number in x.order]
    return array.reshape(sizes)
