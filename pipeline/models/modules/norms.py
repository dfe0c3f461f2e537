"""The computations of norms of single samples: layer, group and RMS norms."""

from __future__ import annotations

import functools
from collections.abc import Sequence

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array, lax

from pipeline.models.layers import standard
from pipeline.models.modules.apply_layers import LayerContext, computes, require_groups


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2))
def standardise(x: Array, axes: Sequence[int], epsilon: float) -> Array:
    """Subtract the mean of float32 x over axes, and divide by the root of the biased variance and
    `epsilon`.

    The variance is the mean of squares around the mean: sums of x and of its squares lose digits
    if a mean is many times the deviation. The derivative is the closed form (Ba et al. 2016), since
    the one that jax derives sums three times.
    """
    centred, inverse = _centre(x, axes, epsilon)
    return centred * inverse


def _centre(x: Array, axes: Sequence[int], epsilon: float) -> tuple[Array, Array]:
    """Return x around its mean over axes, and 1 / the deviation, whose axes have size 1."""
    centred = x - x.mean(axes, keepdims=True)
    return centred, lax.rsqrt(lax.square(centred).mean(axes, keepdims=True) + epsilon)


@standardise.defjvp
def _differentiate_standardise(
    axes: Sequence[int], epsilon: float, primals: tuple[Array], tangents: tuple[Array]
) -> tuple[Array, Array]:
    centred, inverse = _centre(*primals, axes, epsilon)
    y = centred * inverse
    (change,) = tangents
    parallel = y * (y * change).mean(axes, keepdims=True)
    return y, (change - change.mean(axes, keepdims=True) - parallel) * inverse


class NormModule(nn.Module):
    """Standardise each sample over its positions and each group of channels, or without groups
    each position over its channels, in float32. Then scale and shift each channel."""

    epsilon: float
    dtype: str
    """Type of the result."""
    groups: int | None = None

    @nn.compact
    def __call__(self, x: Array) -> Array:
        """Normalise x, (batch, ..., channels); the result has the same shape."""
        channels = (x.shape[-1],)
        scale = self.param("scale", nn.initializers.ones, channels, jnp.float32)
        bias = self.param("bias", nn.initializers.zeros, channels, jnp.float32)
        y = x.astype(jnp.promote_types(x.dtype, jnp.float32))
        if self.groups is None:
            y = standardise(y, (-1,), self.epsilon)
        else:
            grouped = y.reshape(*x.shape[:-1], self.groups, -1)
            y = standardise(grouped, (*range(1, x.ndim - 1), x.ndim), self.epsilon).reshape(x.shape)
        return (y * scale + bias).astype(self.dtype)


@computes(standard.LayerNorm)
def _compute_layer_norm(layer: standard.LayerNorm, x: Array, context: LayerContext) -> Array:
    return NormModule(layer.epsilon, context.dtype, name=context.name)(x)


@computes(standard.RmsNorm)
def _compute_rms_norm(layer: standard.RmsNorm, x: Array, context: LayerContext) -> Array:
    return nn.RMSNorm(layer.epsilon, dtype=context.dtype, name=context.name)(x)


@computes(standard.GroupNorm)
def _compute_group_norm(layer: standard.GroupNorm, x: Array, context: LayerContext) -> Array:
    require_groups(x, layer.groups, context)
    return NormModule(layer.epsilon, context.dtype, layer.groups, name=context.name)(x)
