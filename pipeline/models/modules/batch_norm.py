"""Batch normalisation, with the running variance that MindSpore and PyTorch keep."""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax


class BatchNorm(nn.Module):
    """Normalise each channel over the batch and its positions (Ioffe and Szegedy 2015).

    In training by the mean and the biased variance of the n values that a channel has in the batch,
    else by the running statistics. Those follow the batch's mean and its unbiased variance, which
    is n / (n - 1) times the biased one; flax lets them follow the biased one.

    Parameters `scale` and `bias` and the statistics `mean` and `var` are float32 (channels,).
    """

    train: bool
    axis: int
    """Of the channels."""
    momentum: float
    """What the running statistics keep of themselves at every step."""
    epsilon: float
    dtype: str
    """Of the result; all is computed in float32."""
    scale_init: float

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """x normalised, of the same shape."""
        axes = tuple(axis for axis in range(x.ndim) if axis != self.axis % x.ndim)
        channels = (x.shape[self.axis],)
        running_mean = self.variable("batch_stats", "mean", jnp.zeros, channels, jnp.float32)
        running_var = self.variable("batch_stats", "var", jnp.ones, channels, jnp.float32)
        initial = nn.initializers.constant(self.scale_init)
        scale = self.param("scale", initial, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        how = _How(axes, self.epsilon, self.dtype)
        if not self.train:
            return _scaled(how, x, running_mean.value, running_var.value, scale, bias)
        # Their part in the gradient is in that of `_normalised`.
        mean, var = _statistics(lax.stop_gradient(x).astype(jnp.float32), axes)
        if not self.is_initializing():
            count = prod(x.shape[axis] for axis in axes)
            unbiased = var * (count / max(count - 1, 1))
            running_mean.value = self._followed(running_mean.value, mean)
            running_var.value = self._followed(running_var.value, unbiased)
        return _normalised(how, x, mean, var, scale, bias)

    def _followed(self, running: Array, batch: Array) -> Array:
        return self.momentum * running + (1 - self.momentum) * batch


def _statistics(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance, from one pass over x."""
    squares = lax.square(x)
    mean, mean_of_squares = x.mean(axes), squares.mean(axes)
    # Rounding can take the difference below 0.
    return mean, jnp.maximum(0.0, mean_of_squares - lax.square(mean))


@dataclass(frozen=True)
class _How:
    """The axes that a channel's statistics are of, and what the result is."""

    axes: tuple[int, ...]
    epsilon: float
    dtype: str

    def spread(self, channels: Array) -> Array:
        """A value for each channel, to be combined with images."""
        return jnp.expand_dims(channels, self.axes)


def _scaled(how: _How, x: Array, mean: Array, var: Array, scale: Array, bias: Array) -> Array:
    factor = lax.rsqrt(var + how.epsilon) * scale
    y = x * how.spread(factor) + how.spread(bias - mean * factor)
    return y.astype(how.dtype)


_normalised = jax.custom_vjp(_scaled, nondiff_argnums=(0,))
"""`_scaled` by the mean and the variance of x itself, which have no gradient of their own.

The gradient is the closed form (Ioffe and Szegedy 2015, sec. 3). Like the result, it is a sum of x
and the cotangent with a factor for each channel: both are read as they lie, where the gradient that
jax derives writes and reads what is between them in float32.
"""

Arrays = tuple[Array, ...]


def _forward(
    how: _How, x: Array, mean: Array, var: Array, scale: Array, bias: Array
) -> tuple[Array, Arrays]:
    return _normalised(how, x, mean, var, scale, bias), (x, mean, var, scale)


def _backward(how: _How, operands: Arrays, cotangent: Array) -> Arrays:
    x, mean, var, scale = operands
    dy, inverse = cotangent.astype(jnp.float32), lax.rsqrt(var + how.epsilon)
    by_bias = dy.sum(how.axes)
    by_scale = ((dy * x).sum(how.axes) - mean * by_bias) * inverse
    count = x.size // mean.size
    of_dy = scale * inverse
    of_x = -of_dy * inverse * by_scale / count
    rest = -of_dy * by_bias / count - of_x * mean
    by_x = how.spread(of_dy) * dy + (how.spread(of_x) * x + how.spread(rest))
    zeros = jnp.zeros_like(mean), jnp.zeros_like(var)
    return by_x.astype(x.dtype), *zeros, by_scale, by_bias


_normalised.defvjp(_forward, _backward)
