"""Batch normalisation, with the running variance that MindSpore and PyTorch keep."""

from __future__ import annotations

from math import prod

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
        mean, var = running_mean.value, running_var.value
        if self.train:
            mean, var = _statistics(x.astype(jnp.float32), axes)
            if not self.is_initializing():
                count = prod(x.shape[axis] for axis in axes)
                unbiased = var * (count / max(count - 1, 1))
                running_mean.value = self._followed(running_mean.value, mean)
                running_var.value = self._followed(running_var.value, unbiased)
        initial = nn.initializers.constant(self.scale_init)
        scale = self.param("scale", initial, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        # In flax's order and with its primitives, so that XLA sums the gradients as it did there.
        centred = x - jnp.expand_dims(mean, axes)
        spread = jnp.expand_dims(var, axes) + self.epsilon
        shape = [1 if axis in axes else size for axis, size in enumerate(x.shape)]
        y = centred * (lax.rsqrt(spread) * scale.reshape(shape)) + bias.reshape(shape)
        return y.astype(self.dtype)

    def _followed(self, running: Array, batch: Array) -> Array:
        return self.momentum * running + (1 - self.momentum) * batch


def _statistics(x: Array, axes: tuple[int, ...]) -> tuple[Array, Array]:
    """Mean and biased variance, from one pass over x."""
    squares = lax.square(x)
    mean, mean_of_squares = x.mean(axes), squares.mean(axes)
    # Rounding can take the difference below 0.
    return mean, jnp.maximum(0.0, mean_of_squares - lax.square(mean))
