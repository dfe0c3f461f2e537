"""Normalisations, in float32 whatever the type of the activations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.modules.batch_norm import NormSettings, batch_statistics, normalised, scaled
from pipeline.models.torch_graph.laid import Laid, laid
from pipeline.models.torch_graph.operator_table import aten


class Normalised(NamedTuple):
    """Result of a batch norm in training, and the running statistics that it leaves."""

    y: Laid
    mean: Array
    var: Array


@dataclass(frozen=True)
class BatchNormSettings:
    """Settings of batch norm, in ATen's order; of instance norm, `training` is whether each sample
    has its statistics."""

    training: bool
    momentum: float
    eps: float
    cudnn_enabled: bool = True


@dataclass(frozen=True)
class RunningNorm:
    """Settings of batch norm by the running statistics, in ATen's order."""

    momentum: float
    eps: float


@aten("batch_norm.default", kind="batch_norm", full_weights=True, settings=BatchNormSettings)
def batch_norm(
    x: Laid,
    weight: Laid | None,
    bias: Laid | None,
    running_mean: Laid | None,
    running_var: Laid | None,
    settings: BatchNormSettings,
) -> Laid | Normalised:
    """Normalise each channel (axis 1): by the batch in training, else by the running statistics.

    In training those move by `momentum` towards the batch's mean and its unbiased variance.
    """
    channel = x.axis(1)
    axes = tuple(axis for axis in range(x.ndim) if axis != channel)
    how = NormSettings(axes, settings.eps, str(x.dtype), None, 1)
    channels = x.shape[1]
    scale = jnp.ones(channels, jnp.float32) if weight is None else weight.array
    shift = jnp.zeros(channels, jnp.float32) if bias is None else bias.array
    if not settings.training and running_mean is not None and running_var is not None:
        return x.same(scaled(how, x.array, running_mean.array, running_var.array, scale, shift))
    mean, var = batch_statistics(lax.stop_gradient(x.array), how)
    y = x.same(normalised(how, x.array, mean, var, scale, shift))
    if running_mean is None or running_var is None or not settings.training:
        return y
    count = x.array.size // channels
    unbiased = var * (count / max(count - 1, 1))
    momentum = settings.momentum
    return Normalised(
        y,
        (1 - momentum) * running_mean.array + momentum * mean,
        (1 - momentum) * running_var.array + momentum * unbiased,
    )


@aten(
    "_native_batch_norm_legit_no_training.default",
    kind="batch_norm",
    full_weights=True,
    settings=RunningNorm,
)
def batch_norm_no_training(
    x: Laid,
    weight: Laid | None,
    bias: Laid | None,
    running_mean: Laid,
    running_var: Laid,
    settings: RunningNorm,
) -> tuple[Laid]:
    """Batch norm by the running statistics."""
    how = BatchNormSettings(False, settings.momentum, settings.eps)
    y = batch_norm(x, weight, bias, running_mean, running_var, how)
    assert isinstance(y, Laid)
    return (y,)


@aten(
    "_native_batch_norm_legit_functional.default",
    kind="batch_norm",
    full_weights=True,
    settings=BatchNormSettings,
)
def batch_norm_functional(
    x: Laid,
    weight: Laid | None,
    bias: Laid | None,
    running_mean: Laid,
    running_var: Laid,
    settings: BatchNormSettings,
) -> tuple[Laid | None, ...]:
    """Batch norm by the batch, with the new running statistics as its last two results."""
    settings = replace(settings, training=True)
    result = batch_norm(x, weight, bias, running_mean, running_var, settings)
    assert isinstance(result, Normalised)
    return result.y, None, None, laid(result.mean), laid(result.var)


@aten("layer_norm.default", kind="layer_norm", full_weights=True)
def layer_norm(
    x: Laid,
    normalized_shape: Sequence[int],
    weight: Laid | None = None,
    bias: Laid | None = None,
    eps: float = 1e-5,
    cudnn_enable: bool = True,
) -> Laid:
    """Normalise each sample over its last axes."""
    count = len(normalized_shape)
    if x.shape[x.ndim - count :] != tuple(normalized_shape):
        raise ValueError(f"layer norm over {tuple(normalized_shape)} of shape {x.shape}")
    axes = x.axes(range(x.ndim - count, x.ndim))
    y = _standardise(x.array.astype(jnp.float32), axes, eps)
    return x.same(_affine(x, y, weight, bias, range(x.ndim - count, x.ndim)))


def _standardise(x: Array, axes: Sequence[int], eps: float) -> Array:
    """Subtract the mean over some axes, and divide by the standard deviation."""
    mean = x.mean(axes, keepdims=True)
    var = jnp.square(x - mean).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(var + eps)


@aten("native_layer_norm.default", kind="layer_norm", full_weights=True)
def native_layer_norm(
    x: Laid,
    normalized_shape: Sequence[int],
    weight: Laid | None,
    bias: Laid | None,
    eps: float,
) -> tuple[Laid]:
    """Layer norm without the statistics, which are the other results of the operator."""
    return (layer_norm(x, normalized_shape, weight, bias, eps),)


@aten("rms_norm.default", kind="layer_norm", full_weights=True)
def rms_norm(
    x: Laid,
    normalized_shape: Sequence[int],
    weight: Laid | None = None,
    eps: float | None = None,
) -> Laid:
    """Divide each sample by the root of the mean of squares over its last axes."""
    numbers = range(x.ndim - len(normalized_shape), x.ndim)
    a = x.array.astype(jnp.float32)
    eps = float(jnp.finfo(jnp.float32).eps) if eps is None else eps
    y = a * lax.rsqrt(jnp.square(a).mean(x.axes(numbers), keepdims=True) + eps)
    return x.same(_affine(x, y, weight, None, numbers))


@aten("group_norm.default", kind="group_norm", full_weights=True)
def group_norm(
    x: Laid,
    num_groups: int,
    weight: Laid | None = None,
    bias: Laid | None = None,
    eps: float = 1e-5,
    cudnn_enabled: bool = True,
) -> Laid:
    """Normalise each sample over its positions and each group of channels (axis 1)."""
    order = (0, *range(2, x.ndim), 1)
    ordered = Laid(x.transpose(order), order)
    a = ordered.array.astype(jnp.float32)
    if num_groups < 1 or a.shape[-1] % num_groups:
        raise ValueError(f"{num_groups} groups of {a.shape[-1]} channels")
    grouped = a.reshape((*a.shape[:-1], num_groups, -1))
    y = _standardise(grouped, (*range(1, x.ndim - 1), x.ndim), eps).reshape(a.shape)
    return ordered.same(_affine(ordered, y, weight, bias, [1]))


@aten("instance_norm.default", full_weights=True, settings=BatchNormSettings)
def instance_norm(
    x: Laid,
    weight: Laid | None,
    bias: Laid | None,
    running_mean: Laid | None,
    running_var: Laid | None,
    settings: BatchNormSettings,
) -> Laid:
    """Normalise each channel of each sample over its positions."""
    if not settings.training or running_mean is not None:
        raise ValueError("instance norm with running statistics is not computed")
    return group_norm(x, x.shape[1], weight, bias, settings.eps)


def _affine(
    x: Laid, y: Array, weight: Laid | None, bias: Laid | None, numbers: Sequence[int]
) -> Array:
    """Return y times the weight plus the bias, which have the axes of these numbers."""
    if weight is not None:
        y = y * _spread(x, weight, numbers)
    if bias is not None:
        y = y + _spread(x, bias, numbers)
    return y.astype(x.dtype)


def _spread(x: Laid, weight: Laid, numbers: Sequence[int]) -> Array:
    array = weight.transpose([numbers.index(number) for number in x.order if number in numbers])
    sizes = [x.shape[number] if number in numbers else 1 for number in x.order]
    return array.reshape(sizes)
