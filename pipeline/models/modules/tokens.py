"""What the layers of `tokens` compute."""

from __future__ import annotations

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.lowerings.dense import dense_product
from pipeline.models.layers import tokens
from pipeline.models.modules.apply_layers import (
    LayerContext,
    apply_layer,
    apply_layers,
    features_of,
    require_images,
)

_SCATTERED = nn.initializers.truncated_normal(0.02)
"""Of everything that is learned by place or by number (Devlin et al. 2019, reference code)."""


def _looked_up(table: Array, x: Array) -> Array:
    """The row of each number of x: (batch, tokens, features)."""
    return jnp.take(table, x.reshape(x.shape[0], -1).astype(jnp.int32), axis=0)


class _Embedding(nn.Module):
    layer: tokens.Embedding
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (features_of(self.layer.vocabulary, self.site), self.layer.features)
        table = self.param("table", _SCATTERED, shape, jnp.float32)
        return _looked_up(table.astype(self.site.dtype), x)


@apply_layer.register
def _embedding(layer: tokens.Embedding, x: Array, site: LayerContext) -> Array:
    return _Embedding(layer, site, name=site.name)(x)


class _TiedEmbedding(nn.Module):
    layer: tokens.TiedEmbedding
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        shape = (features_of(self.layer.vocabulary, self.site), self.layer.features)
        table = self.param("table", _SCATTERED, shape, jnp.float32).astype(self.site.dtype)
        y = apply_layers(self.layer.body, _looked_up(table, x), self.site)
        if y.ndim != 3 or y.shape[-1] != shape[1]:
            raise ValueError(
                f"{self.site}: the body gives shape {y.shape}; to be scored against rows of "
                f"{shape[1]} features it must be (batch, tokens, {shape[1]})"
            )
        return y @ table.T


@apply_layer.register
def _tied_embedding(layer: tokens.TiedEmbedding, x: Array, site: LayerContext) -> Array:
    return _TiedEmbedding(layer, site, name=site.name)(x)


@apply_layer.register
def _tokens(layer: tokens.Tokens, x: Array, site: LayerContext) -> Array:
    require_images(x, site)
    return x.reshape(x.shape[0], -1, x.shape[-1])


class _ClassToken(nn.Module):
    @nn.compact
    def __call__(self, x: Array) -> Array:
        token = self.param("token", _SCATTERED, (1, 1, x.shape[-1]), jnp.float32)
        first = jnp.broadcast_to(token.astype(x.dtype), (x.shape[0], 1, x.shape[-1]))
        return jnp.concatenate([first, x], axis=1)


@apply_layer.register
def _class_token(layer: tokens.ClassToken, x: Array, site: LayerContext) -> Array:
    _require_tokens(x, site)
    return _ClassToken(name=site.name)(x)


class _PositionEmbedding(nn.Module):
    layer: tokens.PositionEmbedding
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        return x + self._table(x.shape[1:]).astype(x.dtype)

    def _table(self, shape: tuple[int, ...]) -> Array:
        """The vectors of as many places; of a table that there is, the first."""
        if self.layer.shorter and self.has_variable("params", "table"):
            table: Array = self.get_variable("params", "table")
            if shape[0] < table.shape[0] and shape[1:] == table.shape[1:]:
                return table[: shape[0]]
        return self.param("table", _SCATTERED, shape, jnp.float32)


@apply_layer.register
def _position_embedding(layer: tokens.PositionEmbedding, x: Array, site: LayerContext) -> Array:
    _require_tokens(x, site)
    return _PositionEmbedding(layer, site, name=site.name)(x)


class _SelfAttention(nn.Module):
    layer: tokens.SelfAttention
    site: LayerContext

    @nn.compact
    def __call__(self, x: Array) -> Array:
        batch, count, features = x.shape
        heads = (batch, count, self.layer.heads, features // self.layer.heads)
        query, key, value = (
            self._dense(features, name)(x).reshape(heads) for name in ("query", "key", "value")
        )
        scores = jnp.einsum("bqhd,bkhd->bhqk", query, key) / heads[-1] ** 0.5
        scores = scores.astype(jnp.float32)
        if self.layer.causal:
            scores = jnp.where(jnp.tri(count, dtype=bool), scores, -jnp.inf)
        scores = self._without_padding(scores)
        weights = jax.nn.softmax(scores, axis=-1).astype(x.dtype)
        weights = nn.Dropout(self.layer.dropout, deterministic=not self.site.train)(weights)
        read = jnp.einsum("bhqk,bkhd->bqhd", weights, value)
        return self._dense(features, "out")(read.reshape(x.shape))

    def _without_padding(self, scores: Array) -> Array:
        """Scores (batch, heads, tokens, tokens), the lowest there are where padding is read.

        They are finite: a blank sample, all padding, would have no softmax otherwise.
        """
        counted = self.site.token_mask
        if counted is None:
            return scores
        if counted.shape != (scores.shape[0], scores.shape[-1]):
            raise ValueError(
                f"{self.site}: the mask of padding has shape {counted.shape}, and the tokens are "
                f"{(scores.shape[0], scores.shape[-1])}; none may be added or dropped before it"
            )
        return jnp.where(counted[:, None, None], scores, jnp.finfo(scores.dtype).min)

    def _dense(self, features: int, name: str) -> nn.Dense:
        init = self.site.initializers
        return nn.Dense(
            features,
            dtype=self.site.dtype,
            kernel_init=init.dense.build(),
            bias_init=init.bias.build(),
            dot_general=dense_product(self.site.chooser),
            name=name,
        )


@apply_layer.register
def _self_attention(layer: tokens.SelfAttention, x: Array, site: LayerContext) -> Array:
    _require_tokens(x, site)
    if x.shape[-1] % layer.heads:
        raise ValueError(
            f"{site}: heads {layer.heads} does not divide the {x.shape[-1]} features of "
            f"shape {x.shape}"
        )
    return _SelfAttention(layer, site, name=site.name)(x)


@apply_layer.register
def _first_token(layer: tokens.FirstToken, x: Array, site: LayerContext) -> Array:
    _require_tokens(x, site)
    return x[:, 0]


def _require_tokens(x: Array, site: LayerContext) -> None:
    if x.ndim != 3:
        raise ValueError(
            f"{site}: reads (batch, tokens, features), and shape {x.shape} reaches it; "
            "put tokens or embedding before it"
        )
