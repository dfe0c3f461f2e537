"""Sampling of texts from a network that predicts the next token, in one compiled loop over tokens.

Keys and values of earlier tokens are cached, so that each token needs one pass over the weights.
Without a cache, the network reads its whole context for every token.

A context is at most as long as a training window. When it is full, its second half becomes
the beginning of the next context. So later tokens are sampled from at least half a context.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from flax.traverse_util import unflatten_dict
from jax import Array, export

from pipeline.models.layers import standard, token_mixers, tokens
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.network import Network
from pipeline.stages.build import build_network
from pipeline.stages.export.prediction import Predict, Weights, make_predict
from pipeline.stages.record.trained_run import TrainedRun

DISPATCH_TOKENS = 64
"""Tokens that are sampled in one dispatch."""

TOKEN_BY_TOKEN: tuple[type[LayerSpec], ...] = (
    standard.Activation,
    standard.Dense,
    standard.Dropout,
    standard.GatedMlp,
    standard.LayerNorm,
    standard.Residual,
    standard.RmsNorm,
    standard.Sequence,
    tokens.Embedding,
    token_mixers.MixtureOfExperts,
    tokens.PositionEmbedding,
    tokens.TiedEmbedding,
)
"""Layers that compute each token separately, and layers of such layers. Causal attention, which
isn't listed, has a cache."""

Cache = Any
"""A pytree of arrays that hold earlier tokens, or their keys and values."""
Step = Callable[[Weights, Cache, Array, Array], tuple[Array, Cache]]
"""(weights, cache, token int32 (), position int32 ()) -> (logits of the next token, float32
(vocabulary,); cache with the token)."""


@dataclass(frozen=True)
class Decoder:
    """A network as a function of one token."""

    step: Step
    shapes: Cache
    """Shapes and dtypes of the cache."""
    context: int
    """Most tokens on which the next token depends."""


@dataclass(frozen=True)
class Sampling:
    """Sampling of the next token from the softmax of logits / temperature.

    At temperature 0 the first of the most probable tokens is taken.
    """

    temperature: float = 1.0
    top_k: int | None = None
    """Number of most probable tokens to sample from, and tokens that tie with the last of these;
    None: all."""
    seed: int = 0


class _LoopState(NamedTuple):
    """State of the loop. Token n is sampled with the key (seed, n), in whichever dispatch."""

    tokens: Array
    """int32 (total,). The first `length` are the prompt and the tokens sampled so far."""
    length: Array
    """int32 ()."""
    cursor: Array
    """int32 (): the index of the token to be read next."""
    start: Array
    """int32 (): the index of the first token of the context."""
    cache: Cache


def make_cached_decoder(run: TrainedRun) -> Decoder | None:
    """Return the decoder that caches keys and values; None if a layer of the run has no cache."""
    if run.members or len(run.samples.columns) > 1:
        return None
    context = run.samples.single.shape[0]
    network = build_network(run.recipe, run.samples.targets)
    if not isinstance(network, Network) or not all(map(_is_cached, network.layers)):
        return None
    if run.recipe.dataset.eval.ops:
        return None
    cached_network = network.clone(cached_tokens=context)

    def step(weights: Weights, cache: Cache, token: Array, position: Array) -> tuple[Array, Cache]:
        variables = {**unflatten_dict(dict(weights), sep="/"), "cache": cache}
        sample = token.reshape(1, 1)
        logits, updates = cached_network.apply(
            variables, sample, train=False, position=position, mutable=["cache"]
        )
        return logits.reshape(-1), updates["cache"]

    number = jax.ShapeDtypeStruct((), np.int32)
    _, shapes = jax.eval_shape(step, run.arrays, {}, number, number)
    return Decoder(step, shapes, context)


def _is_cached(layer: LayerSpec) -> bool:
    """Return whether a layer, and all layers inside it, can be computed token by token."""
    if isinstance(layer, tokens.SelfAttention):
        return layer.causal
    if not isinstance(layer, TOKEN_BY_TOKEN):
        return False
    items = [item for _, field in layer if isinstance(field, tuple) for item in field]
    return all(_is_cached(item) for item in items if isinstance(item, LayerSpec))


def make_uncached_decoder(predict: Predict, context: int, dtype: str) -> Decoder:
    """Return the decoder that reads the whole context for each token, as evaluation does."""

    def step(weights: Weights, cache: Cache, token: Array, position: Array) -> tuple[Array, Cache]:
        context_tokens = cache.at[position].set(token.astype(cache.dtype))
        logits = predict(weights, context_tokens[None])
        return logits[0, position], context_tokens

    return Decoder(step, jax.ShapeDtypeStruct((context,), np.dtype(dtype)), context)


def make_decoder(run: TrainedRun) -> Decoder:
    """Return the decoder of a run, with a cache if its layers allow one."""
    sample = run.samples.single
    return make_cached_decoder(run) or make_uncached_decoder(
        make_predict(run), sample.shape[0], sample.dtype
    )


def make_exported_decoder(next_token: export.Exported, context: int) -> Decoder:
    """Return the decoder of an export with a cache."""
    arguments, _ = jax.tree.unflatten(next_token.in_tree, next_token.in_avals)
    _weights, cache, _token, _position = arguments
    return Decoder(next_token.call, cache, context)


def sample_tokens(
    decoder: Decoder, weights: Mapping[str, Any], prompt: np.ndarray, count: int, sampling: Sampling
) -> Iterator[np.ndarray]:
    """Sample `count` tokens after a prompt; yield chunks int32 (n,) of up to `DISPATCH_TOKENS`.

    `prompt` is int32 (tokens,), not empty. Only its last tokens are read if it exceeds the context.
    """
    device_weights = jax.device_put(dict(weights))
    sample = jax.jit(_make_loop(decoder, sampling.top_k, greedy=sampling.temperature == 0))
    key = jax.random.key(sampling.seed)
    temperature = jnp.float32(sampling.temperature or 1.0)
    first = max(0, len(prompt) - decoder.context)
    total = len(prompt) + count
    state = _LoopState(
        tokens=jnp.zeros(total, jnp.int32).at[: len(prompt)].set(prompt),
        length=jnp.int32(len(prompt)),
        cursor=jnp.int32(first),
        start=jnp.int32(first),
        cache=jax.tree.map(lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), decoder.shapes),
    )
    length = len(prompt)
    while length < total:
        until = min(total, length + DISPATCH_TOKENS)
        state = sample(device_weights, state, jnp.int32(until), key, temperature)
        yield np.asarray(state.tokens[length:until])
        length = until


def _make_loop(decoder: Decoder, top_k: int | None, *, greedy: bool) -> Callable[..., _LoopState]:
    """Return the function (weights, state, until, key, temperature) -> state of length `until`."""

    def pick_token(logits: Array, key: Array, temperature: Array) -> Array:
        if greedy:
            return jnp.argmax(logits).astype(jnp.int32)
        if top_k is not None and top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, top_k)[0][-1]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def loop(
        weights: Weights, state: _LoopState, until: Array, key: Array, temperature: Array
    ) -> _LoopState:
        def read_token(state: _LoopState) -> _LoopState:
            position = state.cursor - state.start
            token = state.tokens[state.cursor]
            logits, cache = decoder.step(weights, state.cache, token, position)
            is_last = state.cursor == state.length - 1
            sampled = pick_token(logits, jax.random.fold_in(key, state.length), temperature)
            next_token = jnp.where(is_last, sampled, state.tokens[state.length])
            cursor = state.cursor + 1
            is_full = position + 1 == decoder.context
            start = jnp.where(is_full, cursor - decoder.context // 2, state.start)
            return _LoopState(
                tokens=state.tokens.at[state.length].set(next_token),
                length=state.length + is_last,
                cursor=jnp.where(is_full, start, cursor),
                start=start,
                cache=cache,
            )

        return jax.lax.while_loop(lambda state: state.length < until, read_token, state)

    return loop
