"""Batch normalisation, with the running variance that MindSpore and PyTorch keep."""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial
from math import prod
from typing import NamedTuple

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

Arrays = tuple[Array, ...]

FAR_RATIO = 64
"""Squared mean, as a multiple of the variance, above which sums of x aren't accurate enough: the
relative error of their variance is about 2e-7 of this ratio."""


class BatchNormModule(nn.Module):
    """Normalise each channel over the batch and its positions (Ioffe and Szegedy 2015).

    Training normalises by the mean and the biased variance of the n values of a channel in the
    batch, evaluation by the running statistics. The running variance is an average of unbiased
    variances, n / (n - 1) times the biased ones; in flax, of biased variances.

    Parameters `scale` and `bias` and the statistics `mean` and `var` are float32 (channels,).
    """

    train: bool
    axis: int
    """Axis of the channels."""
    momentum: float
    """Weight of the old running statistics in the update of a step."""
    epsilon: float
    dtype: str
    """Type of the result; computations are in float32."""
    scale_init: float
    batch_axis: str | None = None
    """Mesh axis of the devices that share the batch, and so its statistics."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalise x; the result has the same shape."""
        axes = tuple(axis for axis in range(x.ndim) if axis != self.axis % x.ndim)
        channels = (x.shape[self.axis],)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        initial = nn.initializers.constant(self.scale_init)
        scale = self.param("scale", initial, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        shared = self.train and self.batch_axis is not None
        devices = lax.axis_size(self.batch_axis) if shared else 1
        settings = NormSettings(axes, self.epsilon, self.dtype, self.batch_axis, devices)
        if not self.train:
            running = Statistics(running_mean.value, jnp.zeros(channels), running_var.value)
            return normalise(settings, x, running, scale, bias)
        # The gradient of `normalise_by_batch` includes the gradient through the statistics.
        statistics = compute_statistics(lax.stop_gradient(x), settings)
        if not self.is_initializing():
            count = devices * prod(x.shape[axis] for axis in axes)
            unbiased = statistics.var * (count / max(count - 1, 1))
            running_mean.value = self._blend(running_mean.value, statistics.mean)
            running_var.value = self._blend(running_var.value, unbiased)
        return normalise_by_batch(settings, x, statistics, scale, bias)

    def _blend(self, running: Array, batch: Array) -> Array:
        return self.momentum * running + (1 - self.momentum) * batch


@dataclass(frozen=True)
class NormSettings:
    """Settings of a normalisation; `epsilon`, `dtype` and `batch_axis` as in BatchNormModule."""

    axes: tuple[int, ...]
    """Axes that a channel's statistics are computed over."""
    epsilon: float
    dtype: str
    batch_axis: str | None
    devices: int
    """Number of devices that share the batch."""

    def mean_devices(self, x: Array) -> Array:
        """Return the mean of x over the devices."""
        return self.sum_devices(x) / self.devices

    def sum_devices(self, x: Array) -> Array:
        """Return the sum of x over the devices."""
        return x if self.batch_axis is None else lax.psum(x, self.batch_axis)

    def spread(self, channels: Array) -> Array:
        """Reshape (channels,) to broadcast against x."""
        return jnp.expand_dims(channels, self.axes)


class Statistics(NamedTuple):
    """Statistics of the channels over a batch; float32 (channels,) each.

    The mean is shift + offset. Differences x - shift are small, so sums of them and of their
    squares keep digits that sums of x lose if a mean is many times the deviation.
    """

    shift: Array
    offset: Array
    var: Array
    """Biased variance."""

    @property
    def mean(self) -> Array:
        return self.shift + self.offset


def compute_statistics(x: Array, settings: NormSettings) -> Statistics:
    """Return the statistics of the channels over the batch."""
    sum_shifted = partial(_sum_shifted, settings)
    shift, offset, var = lax.platform_dependent(
        x,
        cpu=partial(_correct_sums, settings),
        cuda=sum_shifted,
        rocm=sum_shifted,
        tpu=sum_shifted,
        default=partial(_sum_unshifted, settings),
    )
    local = Statistics(shift, offset, var)
    if settings.batch_axis is None:
        return local
    # The devices' shifts may differ, so their variances are combined (Chan et al. 1983).
    mean = settings.mean_devices(local.mean)
    var = settings.mean_devices(var + lax.square(local.mean - mean))
    shift = _choose_shift(settings, mean, var)
    return Statistics(shift, mean - shift, var)


def _sum_shifted(settings: NormSettings, x: Array) -> tuple[Array, Array, Array]:
    """Return the statistics with the first value of each channel as shift, by one pass."""
    sizes = [1 if axis in settings.axes else size for axis, size in enumerate(x.shape)]
    shift = lax.slice(x, (0,) * x.ndim, sizes).reshape(-1).astype(jnp.float32)
    return shift, *_compute_moments(settings, x.astype(jnp.float32) - settings.spread(shift))


def _sum_unshifted(settings: NormSettings, x: Array) -> tuple[Array, Array, Array]:
    """Return the statistics without a shift, as the kernel of an emulated chip computes them."""
    mean, var = _compute_moments(settings, x.astype(jnp.float32))
    return jnp.zeros_like(mean), mean, var


def _correct_sums(settings: NormSettings, x: Array) -> tuple[Array, Array, Array]:
    """Return the statistics by sums of x, and by sums around the mean for channels far from zero.

    XLA:CPU's fast sums can't subtract as they read, so a shift costs a copy of x. The shift is 0
    for channels near zero, whose statistics don't depend on other channels.
    """
    values, values_to_square = separate_reads((x, x))
    mean = values.astype(jnp.float32).mean(settings.axes)
    mean_of_squares = lax.square(values_to_square.astype(jnp.float32)).mean(settings.axes)
    # Rounding can make the difference negative.
    var = jnp.maximum(0.0, mean_of_squares - lax.square(mean))
    shift = _choose_shift(settings, mean, var)

    def correct(x: Array) -> tuple[Array, Array]:
        shifted = x.astype(jnp.float32) - settings.spread(shift)
        offset, shifted_var = _compute_moments(settings, shifted)
        return jnp.where(shift == 0, mean, offset), jnp.where(shift == 0, var, shifted_var)

    return shift, *lax.cond(_is_any(shift != 0), correct, lambda x: (mean, var), x)


def _choose_shift(settings: NormSettings, mean: Array, var: Array) -> Array:
    """Return the means of channels that are far from zero, and 0 for others."""
    is_far = lax.square(mean) > FAR_RATIO * (var + settings.epsilon)
    return jnp.where(is_far, mean, 0.0)


def _compute_moments(settings: NormSettings, x: Array) -> tuple[Array, Array]:
    """Return mean and biased variance of float32 values by their sum and sum of squares."""
    mean = x.mean(settings.axes)
    return mean, jnp.maximum(0.0, lax.square(x).mean(settings.axes) - lax.square(mean))


@jax.custom_batching.custom_vmap
def _is_any(conditions: Array) -> Array:
    """Return whether any condition is true, in any run of a population: a `cond` of each run would
    compute both branches."""
    return conditions.any()


@_is_any.def_vmap
def _is_any_of_batch(size: int, batched: list[bool], conditions: Array) -> tuple[Array, bool]:
    return _is_any(conditions), False


def separate_reads(arrays: Arrays) -> Arrays:
    """Return the arrays as different operands for XLA:CPU, even if some are the same array.

    If several sums read a 16-bit array, XLA:CPU writes a float32 copy first. If one sum reads it,
    XLA converts values as it adds them. For 128x32x32x64 values in bfloat16, the sum and the sum of
    squares of different operands take 0.5 ms instead of 3.0.
    """
    if all(array.dtype == jnp.float32 for array in arrays):
        return arrays
    distinct: Arrays = lax.optimization_barrier(arrays)
    return distinct


def normalise(
    settings: NormSettings, x: Array, statistics: Statistics, scale: Array, bias: Array
) -> Array:
    """Normalise x by statistics, then scale and shift by scale and bias (channels,)."""
    shift, offset, var = statistics
    factor = lax.rsqrt(var + settings.epsilon) * scale
    y = (x - settings.spread(shift)) * settings.spread(factor)
    return (y + settings.spread(bias - offset * factor)).astype(settings.dtype)


normalise_by_batch = jax.custom_vjp(normalise, nondiff_argnums=(0,))
"""`normalise` by the statistics of x, whose gradients are part of the gradient of x.

The gradient is the closed form (Ioffe and Szegedy 2015, sec. 3): the sum of x and the cotangent,
each with a factor per channel, and of a shift per channel. The gradient that jax derives also
writes and reads float32 intermediates.
"""


def _forward(
    settings: NormSettings, x: Array, statistics: Statistics, scale: Array, bias: Array
) -> tuple[Array, tuple[Array, Statistics, Array]]:
    y = normalise_by_batch(settings, x, statistics, scale, bias)
    return y, (x, statistics, scale)


def _backward(
    settings: NormSettings, operands: tuple[Array, Statistics, Array], cotangent: Array
) -> tuple[Array, Statistics, Array, Array]:
    x, statistics, scale = operands
    shift, offset, var = statistics
    inverse = lax.rsqrt(var + settings.epsilon)
    sum_products = partial(_sum_products, settings)
    bias_grad, products = lax.platform_dependent(
        x,
        shift,
        cotangent,
        cpu=partial(_sum_and_correct_products, settings),
        cuda=sum_products,
        rocm=sum_products,
        tpu=sum_products,
        # `_sum_unshifted` has a shift of 0.
        default=lambda x, _, cotangent: _sum_unshifted_products(settings, x, cotangent),
    )
    scale_grad = (products - offset * bias_grad) * inverse
    count = settings.devices * (x.size // var.size)
    dy_factor = scale * inverse
    x_factor = -dy_factor * inverse * settings.sum_devices(scale_grad) / count
    constant = -dy_factor * settings.sum_devices(bias_grad) / count - x_factor * offset
    x_grad = settings.spread(dy_factor) * cotangent.astype(jnp.float32)
    shifted = x - settings.spread(shift)
    x_grad += settings.spread(x_factor) * shifted + settings.spread(constant)
    zeros = Statistics(*map(jnp.zeros_like, statistics))
    return x_grad.astype(x.dtype), zeros, scale_grad, bias_grad


def _sum_products(
    settings: NormSettings, x: Array, shift: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Return the sums of the cotangent and of its products with x - shift."""
    dy = cotangent.astype(jnp.float32)
    shifted = x.astype(jnp.float32) - settings.spread(shift)
    return dy.sum(settings.axes), (dy * shifted).sum(settings.axes)


def _sum_unshifted_products(
    settings: NormSettings, x: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Return the sums of the cotangent and of its products with x."""
    dy = cotangent.astype(jnp.float32)
    return dy.sum(settings.axes), (dy * x).sum(settings.axes)


def _sum_and_correct_products(
    settings: NormSettings, x: Array, shift: Array, cotangent: Array
) -> tuple[Array, Array]:
    """Return the sums of `_sum_products`, without a copy of x if no channel has a shift."""
    dy_for_bias, dy_for_scale, x_for_scale = separate_reads((cotangent, cotangent, x))
    bias_grad = dy_for_bias.astype(jnp.float32).sum(settings.axes)
    products = (dy_for_scale.astype(jnp.float32) * x_for_scale).sum(settings.axes)

    def correct(x: Array, cotangent: Array) -> Array:
        _, shifted_products = _sum_products(settings, x, shift, cotangent)
        return jnp.where(shift == 0, products, shifted_products)

    is_shifted = _is_any(shift != 0)
    return bias_grad, lax.cond(is_shifted, correct, lambda *_: products, x, cotangent)


normalise_by_batch.defvjp(_forward, _backward)
