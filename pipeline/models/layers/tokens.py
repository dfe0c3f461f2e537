"""Specs of the layers that read tokens, (batch, tokens, features)."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import component
from pipeline.models.layers.fields import Features
from pipeline.models.layers.model_spec import Layers, LayerSpec


class Lookup(LayerSpec):
    """Base of layers that look up a learned row for each whole number.

    Numbers below 0 count from the end. Rows of numbers from `vocabulary` on are NaN. The layer must
    be the first: bfloat16 activations can't hold whole numbers above 256.
    """

    vocabulary: Features
    """Number of different whole numbers."""
    features: PositiveInt
    """Length of a row."""


@component("layer")
class Embedding(Lookup):
    """A learned row for each whole number: (batch, ...) -> (batch, tokens, features)."""

    name: Literal["embedding"] = "embedding"


@component("layer")
class TiedEmbedding(Lookup):
    """Embed whole numbers, apply the body, and multiply each token by the same rows.

    (batch, ...) -> (batch, tokens, vocabulary) (Press and Wolf 2017).
    """

    name: Literal["tied_embedding"] = "tied_embedding"
    body: Layers


@component("layer")
class Tokens(LayerSpec):
    """Turn positions to tokens: (batch, height, width, channels) -> (batch, tokens, channels)."""

    name: Literal["tokens"] = "tokens"


@component("layer")
class ClassToken(LayerSpec):
    """A learned token before all others (Devlin et al. 2019, sec. 3)."""

    name: Literal["class_token"] = "class_token"


@component("layer")
class PositionEmbedding(LayerSpec):
    """Add a learned vector to each token, by its position.

    With `shorter` there may be fewer tokens than vectors. Then the first vectors are used.
    """

    name: Literal["position_embedding"] = "position_embedding"
    shorter: bool = False


@component("layer")
class SelfAttention(LayerSpec):
    """Self-attention with `heads` heads (Vaswani et al. 2017, sec. 3.2).

    Tokens that a mask marks as padding (`dataset.padding_mask`) are ignored. With `causal` a token
    attends only to itself and to tokens before it. `dropout` is the dropout rate of the attention
    weights.
    """

    name: Literal["self_attention"] = "self_attention"
    heads: PositiveInt
    causal: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


@component("layer")
class FirstToken(LayerSpec):
    """Keep only the first token: (batch, tokens, features) -> (batch, features)."""

    name: Literal["first_token"] = "first_token"
