"""Sampling from a network of the next token, in one compiled loop over tokens.

Keys and values of the tokens so far are cached, so that each token costs one pass over the weights.
A network whose layers can't be cached reads its whole context for every token instead.

A context has as many tokens as a training window. Where it is full, the second half of it is read
again as the beginning of the next: a token is drawn from the half of a context before it, or more.
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

from pipeline.models.layers import standard, tokens
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.modules.standard import Network
from pipeline.stages.build import typed_network
from pipeline.stages.export.prediction import Predict, Weights, make_predict, shapes_of_weights
from pipeline.stages.export.trained_run import TrainedRun

DISPATCH_TOKENS = 64
"""Tokens that are drawn before the host sees them."""

TOKEN_BY_TOKEN: tuple[type[LayerSpec], ...] = (
    standard.Activation,
    standard.Dense,
    standard.Dropout,
    standard.LayerNorm,
    standard.Residual,
    standard.Sequence,
    tokens.Embedding,
    tokens.PositionEmbedding,
    tokens.TiedEmbedding,
)
"""Layers that read each token by itself, or hold layers; and causal self-attention does by its
cache."""

Cache = Any
"""A pytree of arrays: what was read so far."""
Step = Callable[[Weights, Cache, Array, Array], tuple[Array, Cache]]
"""(weights, cache, token int32 (), its position int32 ()) -> logits of the token after it, float32
(vocabulary,), and the cache with that token."""


@dataclass(frozen=True)
class Decoder:
    """A network that reads tokens one by one."""

    step: Step
    shapes: Cache
    """Shapes and dtypes of the cache."""
    context: int
    """The most tokens that a token is drawn from."""


@dataclass(frozen=True)
class Sampling:
    """How the next token is drawn: from the softmax of logits / temperature.

    At temperature 0 it is the most probable one, of equally probable ones the first.
    """

    temperature: float = 1.0
    top_k: int | None = None
    """Draw from this many most probable tokens; None: from all."""
    seed: int = 0


class _Drawn(NamedTuple):
    """State of the loop. Token n is drawn with the key (seed, n), in whichever dispatch."""

    tokens: Array
    """int32 (tokens in all,), of which the first `known` are the prompt and those drawn."""
    known: Array
    cursor: Array
    """The token to be read next."""
    start: Array
    """The token that the context begins with."""
    cache: Cache


def cached_decoder(run: TrainedRun) -> Decoder | None:
    """The decoder of a run that caches keys and values; None where some layer can't be cached."""
    context = run.samples.shape[0]
    network = typed_network(run.recipe, len(run.samples.classes))
    if not isinstance(network, Network) or not all(map(_is_cached, network.layers)):
        return None
    if run.recipe.dataset.eval.ops:
        return None
    one_by_one = network.clone(cached_tokens=context)

    def step(weights: Weights, cache: Cache, token: Array, position: Array) -> tuple[Array, Cache]:
        variables = {**unflatten_dict(dict(weights), sep="/"), "cache": cache}
        sample = token.astype(jnp.float32).reshape(1, 1, 1, 1)
        logits, changed = one_by_one.apply(
            variables, sample, train=False, position=position, mutable=["cache"]
        )
        return logits.reshape(-1), changed["cache"]

    number = jax.ShapeDtypeStruct((), np.int32)
    _, shapes = jax.eval_shape(step, shapes_of_weights(run.arrays), {}, number, number)
    return Decoder(step, shapes, context)


def _is_cached(layer: LayerSpec) -> bool:
    """Whether a layer, and all layers in it, can be computed token by token."""
    if isinstance(layer, tokens.SelfAttention):
        return layer.causal
    inner = [value for _, field in layer for value in (field if isinstance(field, tuple) else ())]
    return isinstance(layer, TOKEN_BY_TOKEN) and all(
        _is_cached(value) for value in inner if isinstance(value, LayerSpec)
    )


def whole_decoder(predict: Predict, context: int, dtype: str) -> Decoder:
    """The decoder that reads all tokens of the context for each, as evaluation does."""

    def step(weights: Weights, cache: Cache, token: Array, position: Array) -> tuple[Array, Cache]:
        read = cache.at[position].set(token.astype(cache.dtype))
        logits = predict(weights, read.reshape(1, -1, 1, 1))
        return logits[0, position], read

    return Decoder(step, jax.ShapeDtypeStruct((context,), np.dtype(dtype)), context)


def decoder_of(run: TrainedRun) -> Decoder:
    """The decoder of a run, with a cache where its layers allow one."""
    cached = cached_decoder(run)
    samples = run.samples
    return cached or whole_decoder(make_predict(run), samples.shape[0], samples.dtype)


def exported_decoder(next_token: export.Exported, context: int) -> Decoder:
    """The decoder of an export with a cache."""
    (_, shapes, _, _), _ = jax.tree.unflatten(next_token.in_tree, next_token.in_avals)
    return Decoder(next_token.call, shapes, context)


def continuation(
    decoder: Decoder,
    weights: Mapping[str, Any],
    prompt: np.ndarray,
    count: int,
    sampling: Sampling,
) -> Iterator[np.ndarray]:
    """Yield `count` tokens after a prompt, int32 (n,), in parts of up to `DISPATCH_TOKENS`.

    `prompt` is int32 (tokens,), one at least; of a longer one than the context the last are read.
    """
    on_device = jax.device_put(dict(weights))
    draw = jax.jit(_make_loop(decoder, sampling.top_k, greedy=sampling.temperature == 0))
    key, temperature = jax.random.key(sampling.seed), jnp.float32(sampling.temperature or 1.0)
    first = max(0, len(prompt) - decoder.context)
    drawn = _Drawn(
        tokens=jnp.zeros(len(prompt) + count, jnp.int32).at[: len(prompt)].set(prompt),
        known=jnp.int32(len(prompt)),
        cursor=jnp.int32(first),
        start=jnp.int32(first),
        cache=jax.tree.map(lambda kept: jnp.zeros(kept.shape, kept.dtype), decoder.shapes),
    )
    known = len(prompt)
    while known < len(prompt) + count:
        until = min(len(prompt) + count, known + DISPATCH_TOKENS)
        drawn = draw(on_device, drawn, jnp.int32(until), key, temperature)
        yield np.asarray(drawn.tokens[known:until])
        known = until


def _make_loop(decoder: Decoder, top_k: int | None, *, greedy: bool) -> Callable[..., _Drawn]:
    """The function (weights, drawn, until, key, temperature) -> drawn up to token `until`."""

    def pick(logits: Array, key: Array, temperature: Array) -> Array:
        if greedy:
            return jnp.argmax(logits).astype(jnp.int32)
        if top_k is not None and top_k < logits.shape[-1]:
            least = jax.lax.top_k(logits, top_k)[0][-1]
            logits = jnp.where(logits >= least, logits, -jnp.inf)
        return jax.random.categorical(key, logits / temperature).astype(jnp.int32)

    def loop(
        weights: Weights, drawn: _Drawn, until: Array, key: Array, temperature: Array
    ) -> _Drawn:
        def read_one(now: _Drawn) -> _Drawn:
            token, position = now.tokens[now.cursor], now.cursor - now.start
            logits, cache = decoder.step(weights, now.cache, token, position)
            is_last = now.cursor == now.known - 1
            token = pick(logits, jax.random.fold_in(key, now.known), temperature)
            kept = jnp.where(is_last, token, now.tokens[now.known])
            cursor = now.cursor + 1
            is_full = position + 1 == decoder.context
            start = jnp.where(is_full, cursor - decoder.context // 2, now.start)
            return _Drawn(
                tokens=now.tokens.at[now.known].set(kept),
                known=now.known + is_last,
                cursor=jnp.where(is_full, start, cursor),
                start=start,
                cache=cache,
            )

        return jax.lax.while_loop(lambda now: now.known < until, read_one, drawn)

    return loop
