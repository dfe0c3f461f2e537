"""Layers that read tokens, (batch, tokens, features); `attention` says what each computes."""

from __future__ import annotations

from typing import Annotated, Literal

from pydantic import Field, PositiveInt

from pipeline.models.layers.fields import Features
from pipeline.models.layers.model_spec import Layers, LayerSpec
from pipeline.registry import part


class Lookup(LayerSpec):
    """Base of the layers that read whole numbers and look up the learned row of each.

    Numbers below 0 count from the end, numbers of `vocabulary` and above give NaN. It is the first
    layer: whole numbers above 256 don't survive the dtype of activations.
    """

    vocabulary: Features
    """How many different numbers there are."""
    features: PositiveInt
    """Length of a row."""


@part("layer")
class Embedding(Lookup):
    """The learned row of each whole number: (batch, ...) -> (batch, tokens, features)."""

    name: Literal["embedding"] = "embedding"


@part("layer")
class TiedEmbedding(Lookup):
    """Embed whole numbers, put the tokens through the body, and score each against the same rows:
    (batch, ...) -> (batch, tokens, vocabulary) (Press and Wolf 2017)."""

    name: Literal["tied_embedding"] = "tied_embedding"
    body: Layers


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
    """Add a learned vector to each token, by where it stands.

    With `shorter` there may be fewer tokens than vectors, which are those of the first places.
    """

    name: Literal["position_embedding"] = "position_embedding"
    shorter: bool = False


@part("layer")
class SelfAttention(LayerSpec):
    """Every token reads all of them, through `heads` heads (Vaswani et al. 2017, sec. 3.2).

    What a mask tells to be padding (`dataset.padding_mask`) is not read. A causal one lets a token
    read itself and those before it alone. `dropout` is the rate of the dropout of the weights that
    each token gives the others.
    """

    name: Literal["self_attention"] = "self_attention"
    heads: PositiveInt
    causal: bool = False
    dropout: Annotated[float, Field(ge=0, lt=1)] = 0.0


@part("layer")
class FirstToken(LayerSpec):
    """The first token alone: (batch, tokens, features) -> (batch, features)."""

    name: Literal["first_token"] = "first_token"
