"""Norms of batches, samples and groups, computed in float32."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.modules.batch_norm import (
    NormSettings,
    Statistics,
    compute_statistics,
    normalise,
    normalise_by_batch,
)
from pipeline.models.modules.norms import standardise
from pipeline.models.torch_graph.operator_table import TorchTensor, aten, pack_result, to_tensor


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
    """Normalize each channel. Results 3 and 4 are the running statistics, new in training."""
    result = batch_norm(x, weight, bias, running_mean, running_var, settings)
    if isinstance(result, NormResult):
        return result.y, None, None, to_tensor(result.mean), to_tensor(result.var)
    return result, None, None, running_mean, running_var


@aten("_native_batch_norm_legit.default", kind="batch_norm", full_weights=True)
def batch_norm_in_place(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    running_mean: TorchTensor,
    running_var: TorchTensor,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[TorchTensor, ...]:
    """Normalize each channel; results 2 and 3 are the batch's statistics, empty in evaluation.

    The operator also changes the running statistics. Programs with it have the functional form.
    """
    settings = BatchNormSettings(training, momentum, eps)
    if training:
        return _normalise_by_batch(x, weight, bias, eps)
    y = batch_norm(x, weight, bias, running_mean, running_var, settings)
    assert isinstance(y, TorchTensor)
    empty = to_tensor(jnp.zeros(0, jnp.float32))
    return y, empty, empty


@aten("_native_batch_norm_legit.no_stats", kind="batch_norm", full_weights=True)
def batch_norm_without_statistics(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    training: bool,
    momentum: float,
    eps: float,
) -> tuple[TorchTensor, ...]:
    """Normalize each channel by the batch; results 2 and 3 are the batch's statistics."""
    return _normalise_by_batch(x, weight, bias, eps)


def _normalise_by_batch(
    x: TorchTensor, weight: TorchTensor | None, bias: TorchTensor | None, eps: float
) -> tuple[TorchTensor, ...]:
    """Return x normalised by the batch, its mean, and 1 / its standard deviation."""
    y = batch_norm(x, weight, bias, None, None, BatchNormSettings(True, 0.0, eps))
    assert isinstance(y, TorchTensor)
    axes = tuple(axis for axis in range(x.ndim) if axis != 1)
    moments = _find_moments(x.plain().astype(jnp.float32), axes, eps)
    return y, *(to_tensor(moment.reshape(-1)) for moment in moments)


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
    y = standardise(x.array.astype(jnp.float32), tuple(x.axes(numbers)), eps)
    return x.with_array(_scale_and_shift(x, y, weight, bias, numbers))


@aten("native_layer_norm.default", kind="layer_norm", full_weights=True)
def native_layer_norm(
    x: TorchTensor,
    normalized_shape: Sequence[int],
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    eps: float,
) -> tuple[TorchTensor, ...]:
    """Normalize each sample; results 2 and 3 are its mean and 1 / its standard deviation."""
    numbers = range(x.ndim - len(normalized_shape), x.ndim)
    y = layer_norm(x, normalized_shape, weight, bias, eps)
    array = x.array.astype(jnp.float32)
    return y, *map(x.with_array, _find_moments(array, x.axes(numbers), eps))


def _find_moments(x: Array, axes: Sequence[int], eps: float) -> tuple[Array, Array]:
    """Return the mean over axes, and 1 / the standard deviation; the axes have size 1."""
    mean = x.mean(axes, keepdims=True)
    return mean, lax.rsqrt(jnp.square(x - mean).mean(axes, keepdims=True) + eps)


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
    y = standardise(grouped, (*range(1, x.ndim - 1), x.ndim), eps).reshape((*sizes, channels))
    return ordered.with_array(_scale_and_shift(ordered, y, weight, bias, [1]))


@dataclass(frozen=True)
class GroupSettings:
    """Settings of group norm in core programs, in ATen's order."""

    batch: int
    channels: int
    positions: int
    num_groups: int
    eps: float


@aten("native_group_norm.default", kind="group_norm", full_weights=True, settings=GroupSettings)
def native_group_norm(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    settings: GroupSettings,
) -> tuple[TorchTensor, ...]:
    """Normalize groups; results 2 and 3 are their means and 1 / their standard deviations."""
    y = group_norm(x, settings.num_groups, weight, bias, settings.eps)
    grouped = x.plain().astype(jnp.float32).reshape((x.shape[0], settings.num_groups, -1))
    mean, deviation = _find_moments(grouped, (2,), settings.eps)
    return y, to_tensor(mean[..., 0]), to_tensor(deviation[..., 0])


@aten("instance_norm.default", full_weights=True, settings=BatchNormSettings)
def instance_norm(
    x: TorchTensor,
    weight: TorchTensor | None,
    bias: TorchTensor | None,
    running_mean: TorchTensor | None,
    running_var: TorchTensor | None,
    settings: BatchNormSettings,
) -> TorchTensor | NormResult:
    """Normalize each channel of each sample over its positions, or by the running statistics.

    Running statistics move by `momentum` to the mean of the samples' statistics, as in batch norm.
    """
    if not settings.training:
        return batch_norm(x, weight, bias, running_mean, running_var, settings)
    y = group_norm(x, x.shape[1], weight, bias, settings.eps)
    if running_mean is None or running_var is None:
        return y
    positions = lax.stop_gradient(x.plain()).astype(jnp.float32).reshape((*x.shape[:2], -1))
    mean = positions.mean((0, 2))
    unbiased = jnp.var(positions, 2, ddof=min(1, positions.shape[2] - 1)).mean(0)
    return NormResult(
        y,
        (1 - settings.momentum) * running_mean.array + settings.momentum * mean,
        (1 - settings.momentum) * running_var.array + settings.momentum * unbiased,
    )


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
