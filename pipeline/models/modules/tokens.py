"""The computations of the layers that read tokens, (batch, tokens, features), and of positions in
attention: rotary embeddings, and slopes of distances (ALiBi).
"""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
from flax import linen as nn
from jax import Array

from pipeline.models.layers import tokens
from pipeline.models.layers.standard import Dense, RmsNorm
from pipeline.models.layers.tokens import Rotary
from pipeline.models.lowerings.lowered_layers import pool_max
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layer,
    apply_layers,
    computes,
    require_images,
    require_mask,
    require_number,
    require_tokens,
)
from pipeline.models.modules.convolution import find_pads
from pipeline.models.modules.standard import average_pool

_LOW, _HIGH = 1, 4
"""Wavelengths in the trained tokens between which Llama 3.1 changes a frequency in part."""


def compute_frequencies(rotary: Rotary, size: int) -> np.ndarray:
    """Return the rotations of a head's `size` features, float64 (size / 2,), radians per token.

    Scaling is linear (Chen et al. 2023), or Llama 3.1's (llama-models, llama3/model.py)."""
    frequencies = rotary.base ** (-np.arange(0, size, 2) / size)
    scaled = frequencies / rotary.factor
    if rotary.trained_tokens is None:
        return scaled
    waves = rotary.trained_tokens * frequencies / (2 * math.pi)
    kept = np.clip((waves - _LOW) / (_HIGH - _LOW), 0, 1)
    return (1 - kept) * scaled + kept * frequencies


def rotate_heads(x: Array, positions: Array, rotary: Rotary) -> Array:
    """Rotate features of heads x, (batch, tokens, heads, size), by positions int32 (tokens,).

    Angles and products are float32; a 16-bit result is rounded once."""
    frequencies = jnp.asarray(compute_frequencies(rotary, x.shape[-1]), jnp.float32)
    angles = positions.astype(jnp.float32)[:, None, None] * frequencies
    cos, sin = jnp.cos(angles), jnp.sin(angles)
    first, second = jnp.split(x.astype(jnp.float32), 2, axis=-1)
    rotated = jnp.concatenate([first * cos - second * sin, second * cos + first * sin], axis=-1)
    return rotated.astype(x.dtype)


def compute_slopes(heads: int) -> np.ndarray:
    """Return the slope of each head, float64 (heads,): Press et al. 2022.

    Slopes are powers of 2^(-8 / heads). If heads isn't a power of two, the first slopes are those
    of the largest power of two below, the others each second one of twice that power."""
    power = 2 ** int(math.log2(heads))
    slopes = 2.0 ** (-8 / power * np.arange(1, power + 1))
    others = 2.0 ** (-4 / power * np.arange(1, 2 * (heads - power) + 1, 2))
    return np.concatenate([slopes, others])


_TABLE_INIT = nn.initializers.truncated_normal(0.02)
"""Initializer of learned tables and tokens (Devlin et al. 2019, reference code)."""


def _embed(module: _Embedding | _TiedEmbedding, x: Array) -> tuple[Array, Array]:
    """Return the learned table, and its rows for token ids x, (batch, tokens, features)."""
    shape = (require_number(module.layer.vocabulary, module.context), module.layer.features)
    table = module.param("table", _TABLE_INIT, shape, jnp.float32).astype(module.context.dtype)
    return table, jnp.take(
        table, x.reshape(x.shape[0], math.prod(x.shape[1:])).astype(jnp.int32), axis=0
    )


@computes(tokens.Embedding)
class _Embedding(nn.Module):
    layer: tokens.Embedding
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return _embed(self, x)[1]


@computes(tokens.TiedEmbedding)
class _TiedEmbedding(nn.Module):
    layer: tokens.TiedEmbedding
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        table, rows = _embed(self, x)
        y = apply_layers(self.layer.body, rows, self.context)
        features = self.layer.features
        if y.ndim != 3 or y.shape[-1] != features:
            raise ValueError(
                f"{self.context}: the body returns shape {y.shape}; to be multiplied by rows of "
                f"{features} features it must be (batch, tokens, {features})"
            )
        return y @ table.T


@computes(tokens.Tokens)
def _compute_tokens(layer: tokens.Tokens, x: Array, context: LayerContext) -> Array:
    """Reshape images (batch, height, width, channels) to (batch, height * width, channels)."""
    require_images(x, context)
    return x.reshape(x.shape[0], x.shape[1] * x.shape[2], x.shape[-1])


@computes(tokens.ClassToken)
class _ClassToken(nn.Module):
    layer: tokens.ClassToken
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        token = self.param("token", _TABLE_INIT, (1, 1, x.shape[-1]), jnp.float32)
        first = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        return jnp.concatenate([first, x], axis=1)


@computes(tokens.PositionEmbedding)
class _PositionEmbedding(nn.Module):
    layer: tokens.PositionEmbedding
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        if self.context.position is not None:
            table: Array = self.get_variable("params", "table")
            return x + jax.lax.dynamic_index_in_dim(table, self.context.position).astype(x.dtype)
        table = self._table(x.shape[1:]).astype(x.dtype)
        if self.context.documents is None:
            return x + table
        return x + table[number_tokens(self.context.documents)]

    def _table(self, shape: tuple[int, ...]) -> Array:
        """Return the table of positions, `shape` (tokens, features). With `shorter` it may be the
        first rows of a longer table."""
        if self.layer.shorter and self.has_variable("params", "table"):
            table: Array = self.get_variable("params", "table")
            if shape[0] < table.shape[0] and shape[1:] == table.shape[1:]:
                return table[: shape[0]]
        return self.param("table", _TABLE_INIT, shape, jnp.float32)


def number_tokens(documents: Array) -> Array:
    """Return the place of each token in its document, from 0, int32 (batch, tokens). `documents`
    has the number of its document."""
    places = jnp.arange(documents.shape[1])
    is_first = jnp.diff(documents, axis=1, prepend=-1) != 0
    return places - jax.lax.cummax(jnp.where(is_first, places, 0), axis=1)


@computes(tokens.SelfAttention)
class _SelfAttention(nn.Module):
    layer: tokens.SelfAttention
    context: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        layer, (batch, count, features) = self.layer, x.shape
        if features % layer.heads:
            raise ValueError(
                f"{self.context}: heads {layer.heads} does not divide the {features} "
                f"features of shape {x.shape}"
            )
        size = features // layer.heads
        if layer.rotary is not None and size % 2:
            raise ValueError(
                f"{self.context}: a head has {size} of the {features} features; rotary rotates "
                "pairs, so the number must be even"
            )
        key_heads = layer.key_heads or layer.heads

        def project(name: str, x: Array, features: int) -> Array:
            dense = Dense(features=features, bias=layer.bias)
            return apply_layer(dense, x, self.context.inside(name))

        def project_heads(name: str, heads: int) -> Array:
            return project(name, x, heads * size).reshape(batch, count, heads, size)

        query = project_heads("query", layer.heads)
        key, value = (project_heads(name, key_heads) for name in ("key", "value"))
        if layer.query_key_norm:
            query = apply_layer(RmsNorm(), query, self.context.inside("query_norm"))
            key = apply_layer(RmsNorm(), key, self.context.inside("key_norm"))
        positions = (
            jnp.arange(count) if self.context.position is None else self.context.position[None]
        )
        if layer.rotary is not None:
            query, key = (rotate_heads(heads, positions, layer.rotary) for heads in (query, key))
        if self.context.position is not None:
            key = self._update_cache("keys", key)
            value = self._update_cache("values", value)
        if key_heads < layer.heads:
            key, value = (jnp.repeat(x, layer.heads // key_heads, axis=2) for x in (key, value))
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / size**0.5
        scores = self._mask_scores(scores.astype(jnp.float32), positions)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        weights = nn.Dropout(layer.dropout, deterministic=not self.context.train)(weights)
        y = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return project("out", y.reshape(x.shape), features)

    def _mask_scores(self, scores: Array, positions: Array) -> Array:
        """Return the scores (batch, heads, queries, keys), less the slopes of ALiBi, and tiny for
        keys that a query at one of `positions`, int32 (queries,), doesn't attend to."""
        layer = self.layer
        if self.context.position is not None and not layer.causal:
            raise ValueError(f"{self.context}: attends to later tokens; must be causal for a cache")
        if layer.causal:
            distances = positions[:, None] - jnp.arange(scores.shape[-1])
            if layer.alibi:
                slopes = jnp.asarray(compute_slopes(layer.heads), scores.dtype)
                scores = scores - slopes[:, None, None] * distances
            is_read = distances >= 0
            if layer.window is not None:
                is_read &= distances < layer.window
            scores = jnp.where(is_read, scores, -jnp.inf)
        documents = self.context.documents
        if documents is not None:
            # Padding attends to itself, so that no softmax is of nothing.
            is_same = documents[:, :, None] == documents[:, None]
            return jnp.where(is_same[:, None], scores, -jnp.inf)
        mask = require_mask((scores.shape[0], scores.shape[-1]), self.context)
        if mask is not None:
            # With -inf, the softmax of a sample of only padding would be NaN.
            scores = jnp.where(mask[:, None, None], scores, jnp.finfo(scores.dtype).min)
        return scores

    def _update_cache(self, name: str, x: Array) -> Array:
        """Write a token's keys or values (batch, 1, heads, features); return the whole cache.

        The cache is (batch, cached tokens, heads, features). Entries after the token are unused.
        """
        shape = (x.shape[0], self.context.cached_tokens, *x.shape[2:])
        cached = self.variable("cache", name, jnp.zeros, shape, x.dtype)
        assert self.context.position is not None, "only tokens read one by one have a cache"
        cached.value = jax.lax.dynamic_update_slice_in_dim(
            cached.value, x, self.context.position, axis=1
        )
        return cached.value


@computes(tokens.Pool1d)
def _compute_pool1d(layer: tokens.Pool1d, x: Array, context: LayerContext) -> Array:
    require_tokens(x, context)
    if context.token_mask is not None:
        raise ValueError(f"{context}: can't pool padded tokens; must be without padding_mask")
    window = (layer.kernel,)
    strides = window if layer.stride is None else (layer.stride,)
    (pads,) = find_pads(x, window, strides, layer.padding, context)
    with jax.named_scope(context.name):
        if isinstance(layer, tokens.MaxPool1d):
            # The tokens are images of height 1.
            rows = x[:, None]
            return pool_max(rows, (1, *window), (1, *strides), ((0, 0), pads), context.policy)[:, 0]
        return average_pool(x, window, strides, [pads])


@computes(tokens.MeanToken)
def _compute_mean_token(layer: tokens.MeanToken, x: Array, context: LayerContext) -> Array:
    require_tokens(x, context)
    mask = require_mask(x.shape[:2], context)
    values = x.astype(jnp.float32)
    if mask is None:
        return values.mean(axis=1).astype(x.dtype)
    total = jnp.where(mask[..., None], values, 0).sum(axis=1)
    count = jnp.maximum(mask.sum(axis=1, dtype=jnp.float32), 1)  # 0 of a text without tokens
    return (total / count[:, None]).astype(x.dtype)


@computes(tokens.FirstToken)
def _compute_first_token(layer: tokens.FirstToken, x: Array, context: LayerContext) -> Array:
    require_tokens(x, context)
    return x[:, 0]
