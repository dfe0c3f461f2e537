"""The computations of layers that mix tokens in large networks: convolutions of tokens, experts of
which a router chooses, and selective state spaces (Mamba-2 in chunks, Dao and Gu 2024, section
6)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array
from jax.nn import logsumexp, one_hot

from pipeline.models.layers import token_mixers, tokens
from pipeline.models.layers.standard import Dense
from pipeline.models.lowerings.lowered_layers import conv2d
from pipeline.models.lowerings.problem import compute_reach
from pipeline.models.modules.apply_layers import (
    LayerContext,
    add_sample_losses,
    apply_layer,
    computes,
    require_mask,
    require_tokens,
)
from pipeline.models.modules.convolution import (
    ConvolutionModule,
    add_layer_bias,
    find_pads,
    make_kernel,
)
from pipeline.models.modules.standard import activate


@computes(tokens.Conv1d)
class _Conv1d(ConvolutionModule):
    layer: tokens.Conv1d

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        mask = require_mask(x.shape[:2], self.context)
        if mask is not None:
            # Set padding to zero, like the padding at both ends.
            x = jnp.where(mask[..., None], x, jnp.zeros((), x.dtype))
        layer = self.layer
        size = (layer.kernel,)
        dilation = (layer.dilation,)
        strides = (layer.stride,)
        pads = find_pads(x, compute_reach(size, dilation), strides, layer.padding, self.context)
        # The tokens are images of height 1.
        y = conv2d(
            x[:, None],
            make_kernel(self, x, size)[None],
            strides=(1, layer.stride),
            padding=((0, 0), *pads),
            dilation=(1, layer.dilation),
            groups=layer.groups,
            policy=self.context.policy,
        )
        return add_layer_bias(self, y[:, 0])


@computes(token_mixers.MixtureOfExperts)
class _MixtureOfExperts(nn.Module):
    layer: token_mixers.MixtureOfExperts
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        layer, (_, count, features) = self.layer, x.shape
        init = self.context.initializers.dense.build()
        router = self.param("router", init, (features, layer.experts), jnp.float32)
        sizes = {"gate": layer.hidden, "up": layer.hidden, "down": features}
        init_experts = _draw_each(init)
        kernels = {
            name: self.param(
                name,
                init_experts,
                (layer.experts, layer.hidden if name == "down" else features, size),
                jnp.float32,
            ).astype(x.dtype)
            for name, size in sizes.items()
        }
        logits = x.astype(jnp.float32) @ router
        probabilities = jax.nn.softmax(logits)
        largest, choices = jax.lax.top_k(probabilities, layer.top)
        is_token = require_mask(x.shape[:2], self.context)
        if is_token is None:
            is_token = jnp.ones(x.shape[:2], bool)
        is_chosen = one_hot(choices, layer.experts).sum(axis=2) * is_token[..., None]
        if self.context.train and layer.adds_losses:
            add_sample_losses(self, self._compute_losses(logits, is_chosen, is_token))
        weights = (largest / largest.sum(axis=-1, keepdims=True)).astype(x.dtype)
        if self.context.train and layer.capacity_factor is not None:
            capacity = math.ceil(layer.capacity_factor * count * layer.top / layer.experts)
            if capacity < count:
                return self._compute_first(x, kernels, weights, choices, is_chosen, capacity)
        results = self._compute_experts(kernels, x, "btf,efh->ebth", "ebth,ehf->ebtf")
        by_expert = one_hot(choices, layer.experts, dtype=x.dtype) * weights[..., None]
        return jnp.einsum("btke,ebtf->btf", by_expert, results)

    def _compute_experts(
        self, kernels: dict[str, Array], x: Array, inwards: str, outwards: str
    ) -> Array:
        gate = activate(self.layer.activation, jnp.einsum(inwards, x, kernels["gate"]))
        return jnp.einsum(outwards, gate * jnp.einsum(inwards, x, kernels["up"]), kernels["down"])

    def _compute_first(
        self,
        x: Array,
        kernels: dict[str, Array],
        weights: Array,
        choices: Array,
        is_chosen: Array,
        capacity: int,
    ) -> Array:
        """Return the sum of the results of the first `capacity` tokens of each expert."""
        count = x.shape[1]
        # The largest keys are the first tokens; 0 is a token that didn't choose the expert.
        keys = is_chosen * jnp.arange(count, 0, -1)[:, None]
        _, places = jax.lax.top_k(keys.swapaxes(1, 2), capacity)  # (batch, experts, capacity)
        rows = jnp.arange(len(x))[:, None, None]
        results = self._compute_experts(
            kernels, x[rows, places], "becf,efh->bech", "bech,ehf->becf"
        )
        number = jnp.cumsum(is_chosen, axis=1) - 1  # of a token among those that chose the expert
        place = jnp.take_along_axis(number, choices, axis=2).astype(jnp.int32)
        is_computed = jnp.take_along_axis(is_chosen, choices, axis=2) * (place < capacity)
        outputs = results[rows, choices, jnp.clip(place, 0, capacity - 1)]
        return jnp.einsum("btk,btkf->btf", weights * is_computed.astype(x.dtype), outputs)

    def _compute_losses(self, logits: Array, is_chosen: Array, is_token: Array) -> Array:
        """Return the weighted losses of the router, float32 (batch,)."""
        layer = self.layer
        tokens_of_sample = jnp.maximum(is_token.sum(axis=1, dtype=jnp.float32), 1)
        shares = is_chosen.sum(axis=1) / (layer.top * tokens_of_sample[:, None])
        probabilities = jax.nn.softmax(logits) * is_token[..., None]
        means = probabilities.sum(axis=1) / tokens_of_sample[:, None]
        losses: Array = layer.balance * layer.experts * (shares * means).sum(axis=-1)
        if layer.z_loss:
            squares = jnp.where(is_token, jnp.square(logsumexp(logits, axis=-1)), 0)
            losses = losses + layer.z_loss * squares.sum(axis=1) / tokens_of_sample
        return losses


def _draw_each(draw: Callable[..., Any]) -> Callable[..., Array]:
    """Return an initialiser that draws the kernel of each expert separately, so that the number of
    experts doesn't count among its inputs."""

    def draw_all(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
        kernels: Array = jax.vmap(lambda key: draw(key, shape[1:], dtype))(
            jax.random.split(key, shape[0])
        )
        return kernels

    return draw_all


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
        grouped = y.reshape(batch, count, layer.groups, inner // layer.groups)
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
        shape = (len(x), padded.shape[1] // chunk, chunk, *values.shape[2:])
        return padded.reshape(shape).swapaxes(2, 3)

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
    return y.reshape(len(x), count + padding, *y.shape[3:])[:, :count]


def _draw_step_bias(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    """Draw step sizes, and return the biases from which softplus computes them."""
    low, high = map(jnp.log, _STEP_SIZES)
    sizes = jnp.exp(jax.random.uniform(key, shape, dtype, low, high))
    sizes = jnp.maximum(sizes, _SMALLEST_STEP)
    return sizes + jnp.log(-jnp.expm1(-sizes))


def _draw_log_decay(key: Any, shape: tuple[int, ...], dtype: Any) -> Array:
    return jnp.log(jax.random.uniform(key, shape, dtype, *_DECAYS))
