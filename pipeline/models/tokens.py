"""Layers that read tokens, (batch, tokens, features); `attention` says what each computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.models.spec import LayerSpec
from pipeline.registry import part


@part("layer")
class Embedding(LayerSpec):
    """The learned row of each whole number: (batch, ...) -> (batch, tokens, features).

    Numbers below 0 count from the end, numbers of `vocabulary` and above give NaN. It is the first
    layer: whole numbers above 256 don't survive the dtype of activations.
    """

    name: Literal["embedding"] = "embedding"
    vocabulary: PositiveInt
    features: PositiveInt


@part("layer")
class Tokens(LayerSpec):
    """Every position is a token: (batch, height, width, channels) -> (batch, tokens, channels)."""

    name: Literal["tokens"] = "tokens"


@part("layer")
class ClassToken(LayerSpec):
    """A learned token before all others (Devlin et al. 2019, sec. 3)."""

    name: Literal["class_token"] = "class_token"


@part("layer")
class PositionEmbedding(LayerSpec):
    """Add a learned vector to each token, by where it stands."""

    name: Literal["position_embedding"] = "position_embedding"


@part("layer")
class SelfAttention(LayerSpec):
    """Every token reads all of them, through `heads` heads (Vaswani et al. 2017, sec. 3.2).

    `dropout` is the rate of the dropout of the weights that each token gives the others.
    """

    name: Literal["self_attention"] = "self_attention"
    heads: PositiveInt
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


@part("layer")
class FirstToken(LayerSpec):
    """The first token alone: (batch, tokens, features) -> (batch, features)."""

    name: Literal["first_token"] = "first_token"
