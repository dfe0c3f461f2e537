"""Batch normalisation, with the running variance that MindSpore and PyTorch keep."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

Arrays = tuple[Array, ...]


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
            return normalise(settings, x, running_mean.value, running_var.value, scale, bias)
        # The gradient of `normalise_by_batch` includes the gradient through the statistics.
        mean, var = compute_statistics(lax.stop_gradient(x), settings)
        if not self.is_initializing():
            count = devices * prod(x.shape[axis] for axis in axes)
            unbiased = var * (count / max(count - 1, 1))
            running_mean.value = self._blend(running_mean.value, mean)
            running_var.value = self._blend(running_var.value, unbiased)
        return normalise_by_batch(settings, x, mean, var, scale, bias)

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

    def mean(self, x: Array) -> Array:
        """Return the mean of x over the axes and the devices."""
        mean = x.mean(self.axes)
        if self.batch_axis is None:
            return mean
        return self.sum_devices(mean) / self.devices

    def sum_devices(self, x: Array) -> Array:
        """Return the sum of x over the devices."""
        return x if self.batch_axis is None else lax.psum(x, self.batch_axis)

    def spread(self, channels: Array) -> Array:
        """Reshape (channels,) to broadcast against x."""
        return jnp.expand_dims(channels, self.axes)


def compute_statistics(x: Array, settings: NormSettings) -> tuple[Array, Array]:
    """Return means and biased variances of the channels over the batch, float32 (channels,)."""
    values, values_to_square = (y.astype(jnp.float32) for y in separate_reads((x, x)))
    mean = settings.mean(values)
    mean_of_squares = settings.mean(lax.square(values_to_square))
    # Rounding can make the difference negative.
    return mean, jnp.maximum(0.0, mean_of_squares - lax.square(mean))


def separate_reads(arrays: Arrays) -> Arrays:
    """Return the arrays as different operands for XLA, even if some are the same array.

    If several sums read a 16-bit array, XLA:CPU writes a float32 copy first. If one sum reads it,
    XLA converts values as it adds them. For 128x32x32x64 values in bfloat16, the sum and the sum of
    squares of different operands take 0.5 ms instead of 3.0.
    """
    if all(array.dtype == jnp.float32 for array in arrays):
        return arrays
    distinct: Arrays = lax.platform_dependent(
        arrays, cpu=lax.optimization_barrier, default=lambda arrays: arrays
    )
    return distinct


def normalise(
    settings: NormSettings, x: Array, mean: Array, var: Array, scale: Array, bias: Array
) -> Array:
    """Normalise x by mean and variance, then scale and shift. Other arrays are (channels,)."""
    factor = lax.rsqrt(var + settings.epsilon) * scale
    y = x * settings.spread(factor) + settings.spread(bias - mean * factor)
    return y.astype(settings.dtype)


normalise_by_batch = jax.custom_vjp(normalise, nondiff_argnums=(0,))
"""`normalise` by the mean and the variance of x, whose gradients are part of the gradient of x.

The gradient is the closed form (Ioffe and Szegedy 2015, sec. 3): the sum of x and the cotangent,
each with a factor per channel, and of a shift per channel. The gradient that jax derives also
writes and reads float32 intermediates.
"""


def _forward(
    settings: NormSettings, x: Array, mean: Array, var: Array, scale: Array, bias: Array
) -> tuple[Array, Arrays]:
    return normalise_by_batch(settings, x, mean, var, scale, bias), (x, mean, var, scale)


def _backward(settings: NormSettings, operands: Arrays, cotangent: Array) -> Arrays:
    x, mean, var, scale = operands
    dy = cotangent.astype(jnp.float32)
    inverse = lax.rsqrt(var + settings.epsilon)
    dy_for_bias, dy_for_scale, x_for_scale = separate_reads((cotangent, cotangent, x))
    bias_grad = dy_for_bias.astype(jnp.float32).sum(settings.axes)
    products = dy_for_scale.astype(jnp.float32) * x_for_scale
    scale_grad = (products.sum(settings.axes) - mean * bias_grad) * inverse
    count = settings.devices * (x.size // mean.size)
    dy_factor = scale * inverse
    x_factor = -dy_factor * inverse * settings.sum_devices(scale_grad) / count
    shift = -dy_factor * settings.sum_devices(bias_grad) / count - x_factor * mean
    x_grad = settings.spread(dy_factor) * dy
    x_grad += settings.spread(x_factor) * x + settings.spread(shift)
    zeros = jnp.zeros_like(mean), jnp.zeros_like(var)
    return x_grad.astype(x.dtype), *zeros, scale_grad, bias_grad


normalise_by_batch.defvjp(_forward, _backward)
