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

    In training by the mean and the biased variance of the n values that a channel has in the batch,
    else by the running statistics. Those follow the batch's mean and its unbiased variance, which
    is n / (n - 1) times the biased one; flax lets them follow the biased one.

    Parameters `scale` and `bias` and the statistics `mean` and `var` are float32 (channels,).
    """

    train: bool
    axis: int
    """Axis of the channels."""
    momentum: float
    """Share of their old value that the running statistics keep at every step."""
    epsilon: float
    dtype: str
    """Type of the result; everything is computed in float32."""
    scale_init: float
    batch_axis: str | None = None
    """Axis of a mesh whose devices share the batch; statistics are then over all of them."""

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
            return scaled(settings, x, running_mean.value, running_var.value, scale, bias)
        # The gradient through the statistics is part of that of `normalised`.
        mean, var = batch_statistics(lax.stop_gradient(x), settings)
        if not self.is_initializing():
            count = devices * prod(x.shape[axis] for axis in axes)
            unbiased = var * (count / max(count - 1, 1))
            running_mean.value = self._blend(running_mean.value, mean)
            running_var.value = self._blend(running_var.value, unbiased)
        return normalised(settings, x, mean, var, scale, bias)

    def _blend(self, running: Array, batch: Array) -> Array:
        return self.momentum * running + (1 - self.momentum) * batch


@dataclass(frozen=True)
class NormSettings:
    """The axes that a channel's statistics are taken over, epsilon, the type of the result, and the
    devices that share the batch."""

    axes: tuple[int, ...]
    epsilon: float
    dtype: str
    batch_axis: str | None
    devices: int

    def mean(self, x: Array) -> Array:
        """Mean of x over the axes and the devices."""
        own = x.mean(self.axes)
        return own if self.batch_axis is None else self.total(own) / self.devices

    def total(self, own: Array) -> Array:
        """Add what each device has of a sum over the batch."""
        return own if self.batch_axis is None else lax.psum(own, self.batch_axis)

    def spread(self, channels: Array) -> Array:
        """Reshape (channels,) to broadcast against x."""
        return jnp.expand_dims(channels, self.axes)


def batch_statistics(x: Array, settings: NormSettings) -> tuple[Array, Array]:
    """Mean and biased variance of a channel over the batch, float32 (channels,) each."""
    values, again = (part.astype(jnp.float32) for part in read_apart((x, x)))
    mean, mean_of_squares = settings.mean(values), settings.mean(lax.square(again))
    # Rounding can make the difference negative.
    return mean, jnp.maximum(0.0, mean_of_squares - lax.square(mean))


def read_apart(arrays: Arrays) -> Arrays:
    """Return the arrays, of which XLA does not know that some may be one.

    XLA:CPU writes a float32 copy of an array of fewer bits that several sums read. A sum that has
    its operand to itself converts what it reads: of 128x32x32x64 values in bfloat16 the sum and
    that of the squares take 0.5 ms in place of 3.0.
    """
    if all(array.dtype == jnp.float32 for array in arrays):
        return arrays
    apart: Arrays = lax.platform_dependent(
        arrays, cpu=lax.optimization_barrier, default=lambda arrays: arrays
    )
    return apart


def scaled(
    settings: NormSettings, x: Array, mean: Array, var: Array, scale: Array, bias: Array
) -> Array:
    """Normalise x by a mean and a variance, then scale and shift; all but x are (channels,)."""
    factor = lax.rsqrt(var + settings.epsilon) * scale
    y = x * settings.spread(factor) + settings.spread(bias - mean * factor)
    return y.astype(settings.dtype)


normalised = jax.custom_vjp(scaled, nondiff_argnums=(0,))
"""`scaled` by the mean and the variance of x itself, which get no gradient of their own.

The gradient is the closed form (Ioffe and Szegedy 2015, sec. 3): a sum of x and the cotangent, each
with a factor per channel. It reads both in their own type, while the gradient that jax derives also
writes and reads float32 intermediates.
"""


def _forward(
    settings: NormSettings, x: Array, mean: Array, var: Array, scale: Array, bias: Array
) -> tuple[Array, Arrays]:
    return normalised(settings, x, mean, var, scale, bias), (x, mean, var, scale)


def _backward(settings: NormSettings, operands: Arrays, cotangent: Array) -> Arrays:
    x, mean, var, scale = operands
    dy, inverse = cotangent.astype(jnp.float32), lax.rsqrt(var + settings.epsilon)
    of_bias, of_scale, x_of_scale = read_apart((cotangent, cotangent, x))
    by_bias = of_bias.astype(jnp.float32).sum(settings.axes)
    products = of_scale.astype(jnp.float32) * x_of_scale
    by_scale = (products.sum(settings.axes) - mean * by_bias) * inverse
    count = settings.devices * (x.size // mean.size)
    of_dy = scale * inverse
    of_x = -of_dy * inverse * settings.total(by_scale) / count
    rest = -of_dy * settings.total(by_bias) / count - of_x * mean
    by_x = settings.spread(of_dy) * dy + (settings.spread(of_x) * x + settings.spread(rest))
    zeros = jnp.zeros_like(mean), jnp.zeros_like(var)
    return by_x.astype(x.dtype), *zeros, by_scale, by_bias


normalised.defvjp(_forward, _backward)
