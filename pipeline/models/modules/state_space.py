"""The computation of selective state spaces: Mamba-2 in chunks (Dao and Gu 2024, section 6)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import token_mixers
from pipeline.models.layers.standard import Dense
from pipeline.models.modules.activations import activate
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layer,
    computes,
    require_mask,
    require_tokens,
)

_EPSILON = 1e-5
_STEP_SIZES = 0.001, 0.1
"""Range of the initial step sizes, which are drawn log-uniformly."""
_SMALLEST_STEP = 1e-4
_DECAYS = 1.0, 16.0
"""Range of the initial decays -A, which are drawn uniformly."""


@computes(token_mixers.StateSpace)
class _StateSpace(nn.Module):
    layer: token_mixers.StateSpace
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        layer, (batch, count, features) = self.layer, x.shape
        inner, mixed = layer.heads * layer.head, layer.groups * layer.state
        mask = require_mask(x.shape[:2], self.context)
        if mask is not None:
            x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
        width = 2 * inner + 2 * mixed + layer.heads
        projected = self._project("in", x, width)
        gate, joined, steps = jnp.split(projected, [inner, width - layer.heads], axis=-1)
        joined = activate("swish", self._convolve(joined))
        if mask is not None:
            joined = jnp.where(mask[..., None], joined, jnp.zeros((), x.dtype))
        inputs, b, c = jnp.split(joined.astype(jnp.float32), [inner, inner + mixed], axis=-1)
        step_bias = self.param("step_bias", _draw_step_bias, (layer.heads,), jnp.float32)
        decay = -jnp.exp(self.param("log_decay", _draw_log_decay, (layer.heads,), jnp.float32))
        skip = self.param("skip", nn.initializers.ones, (layer.heads,), jnp.float32)
        sizes = jax.nn.softplus(steps.astype(jnp.float32) + step_bias)
        if mask is not None:
            sizes = jnp.where(mask[..., None], sizes, 0)
        inputs = inputs.reshape(batch, count, layer.heads, layer.head)
        shape = batch, count, layer.groups, layer.state
        b, c = (
            jnp.repeat(values.reshape(shape), layer.heads // layer.groups, axis=2)
            for values in (b, c)
        )
        y = scan_chunks(inputs * sizes[..., None], sizes * decay, b, c, layer.chunk)
        y = (y + skip[:, None] * inputs).reshape(batch, count, inner)
        y = y * jax.nn.swish(gate.astype(jnp.float32))
        grouped = y.reshape(batch, count, layer.groups, -1)
        mean_square = jnp.square(grouped).mean(axis=-1, keepdims=True)
        scale = self.param("scale", nn.initializers.ones, (inner,), jnp.float32)
        normal = (grouped * jax.lax.rsqrt(mean_square + _EPSILON)).reshape(y.shape) * scale
        return self._project("out", normal.astype(x.dtype), features)

    def _project(self, name: str, x: Array, features: int) -> Array:
        return apply_layer(Dense(features=features, bias=False), x, self.context.inside(name))

    def _convolve(self, x: Array) -> Array:
        """Return the sum of each feature's last `kernel` tokens times its weights, with a bias."""
        kernel, features = self.layer.kernel, x.shape[-1]
        init = nn.initializers.variance_scaling(1 / 3, "fan_in", "uniform")
        weights = self.param("taps", init, (kernel, features), jnp.float32).astype(x.dtype)
        bias = self.param("bias", nn.initializers.zeros, (features,), jnp.float32)
        padded = jnp.pad(x, ((0, 0), (kernel - 1, 0), (0, 0)))
        count = x.shape[1]
        taps = (padded[:, tap : tap + count] * weights[tap] for tap in range(kernel))
        return sum(taps, bias.astype(x.dtype))


def scan_chunks(x: Array, decays: Array, b: Array, c: Array, chunk: int) -> Array:
    """Return y_t = C_t h_t of the recurrence h_t = exp(decays_t) h_{t-1} + B_t x_t, computed in
    chunks.

    Takes x (batch, tokens, heads, features), decays (batch, tokens, heads), which aren't positive,
    and b, c (batch, tokens, heads, state), all float32. Returns the shape of x.
    """
    count = x.shape[1]
    chunk = min(chunk, count)
    padding = -count % chunk

    def divide(values: Array) -> Array:
        """Return values (batch, chunks, heads, chunk, ...)."""
        padded = jnp.pad(values, ((0, 0), (0, padding), *((0, 0),) * (values.ndim - 2)))
        return padded.reshape(len(x), -1, chunk, *values.shape[2:]).swapaxes(2, 3)

    x, b, c, decays = map(divide, (x, b, c, decays))
    lower = jnp.tril(jnp.ones((chunk, chunk), bool))
    # Sums of decays from each token to a later one, as sums of their own: differences of sums from
    # the start would lose digits.
    spans = jnp.where(jnp.tril(lower, -1), decays[..., :, None], 0).cumsum(axis=-2)
    weights = jnp.where(lower, jnp.exp(jnp.where(lower, spans, 0)), 0)
    scores = jnp.einsum("bnhis,bnhjs->bnhij", c, b)
    inside = jnp.einsum("bnhij,bnhjf->bnhif", scores * weights, x)
    ends = jnp.exp(spans[..., -1, :])  # from each token to the last of its chunk
    added = jnp.einsum("bnhj,bnhjs,bnhjf->bnhsf", ends, b, x)
    since_start = decays.cumsum(axis=-1)

    def pass_on(state: Array, read: tuple[Array, Array]) -> tuple[Array, Array]:
        share, new = read
        return share[..., None, None] * state + new, state

    shares = jnp.exp(since_start[..., -1])
    first = jnp.zeros_like(added[:, 0])
    _, states = jax.lax.scan(pass_on, first, (shares.swapaxes(0, 1), added.swapaxes(0, 1)))
    earlier = jnp.einsum("bnhis,nbhsf->bnhif", c * jnp.exp(since_start)[..., None], states)
    y = (inside + earlier).swapaxes(2, 3)
    return y.reshape(len(x), -1, *y.shape[3:])[:, :count]


def _draw_step_bias(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw step sizes, and return the biases from which softplus computes them."""
    low, high = map(jnp.log, _STEP_SIZES)
    sizes = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    sizes = jnp.maximum(sizes, _SMALLEST_STEP)
    return sizes + jnp.log(-jnp.expm1(-sizes))


def _draw_log_decay(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, *_DECAYS))
