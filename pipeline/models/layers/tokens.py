"""Specs of the layers that read tokens, (batch, tokens, features)."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import (
    Field,
    NonNegativeInt,
    PositiveInt,
    model_validator,
)

from pipeline.core.registry import Spec, component
from pipeline.models.layers.model_spec import Features, Initializer, Layers, LayerSpec
from pipeline.models.layers.standard import require_even_groups


class Lookup(LayerSpec):
    """Base of layers that look up a learned row of a table for each whole number.

    A number n below 0 looks up row `vocabulary` + n, and a number from `vocabulary` on results in
    NaN. The layer must be the first: bfloat16 activations can't hold all whole numbers above 256.
    """

    reads_whole_numbers: ClassVar[bool] = True
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
    """Embed whole numbers, apply the body, and multiply each token by the same rows. (batch, ...)
    -> (batch, tokens, vocabulary) (Press and Wolf 2017)."""

    name: Literal["tied_embedding"] = "tied_embedding"
    body: Layers


@component("layer")
class Tokens(LayerSpec):
    """Turn pixels into tokens: (batch, height, width, channels) -> (batch, tokens, channels)."""

    name: Literal["tokens"] = "tokens"


@component("layer")
class ClassToken(LayerSpec):
    """A learned token before all others (Devlin et al. 2019, sec. 3)."""

    mixes_tokens: ClassVar[bool] = True
    name: Literal["class_token"] = "class_token"


@component("layer")
class PositionEmbedding(LayerSpec):
    """Add a learned vector to each token, by its position.

    The network is initialised with a vector for each token. With `shorter` later inputs
    may have fewer tokens, to which the first vectors are added.
    """

    name: Literal["position_embedding"] = "position_embedding"
    shorter: bool = False


class Rotary(Spec):
    """Rotation of queries and keys by the position of their token (Su et al. 2021).

    Features i and i + size / 2 of a head of `size` features are rotated by position * frequency
    radians, with the frequency base^(-2i / size), as in transformers. In Llama's files they are
    features 2i and 2i + 1.
    """

    base: Annotated[float, Field(gt=1)] = 10_000.0
    factor: Annotated[float, Field(ge=1)] = 1.0
    """Frequencies are divided by it, to read `factor` times as many tokens as in training (Chen et
    al. 2023)."""
    trained_tokens: PositiveInt | None = None
    """Llama 3.1's rule instead: only a wavelength above this number of tokens is divided by
    `factor`, none below a quarter of it, and those between in part. null: all are divided."""

    @model_validator(mode="after")
    def _require_factor(self) -> Self:
        if self.trained_tokens is not None and self.factor == 1:
            raise ValueError(
                f"trained_tokens {self.trained_tokens} needs a factor above 1, by which it divides"
            )
        return self


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
    key_heads: PositiveInt | None = None
    """Heads of keys and values, each for heads / key_heads consecutive heads of queries (Ainslie et
    al. 2023). null: as many as `heads`."""
    window: PositiveInt | None = None
    """Tokens that a token attends to, itself and those just before it. null: all before it."""
    query_key_norm: bool = False
    """Whether `rms_norm` normalises each head's query and key, before they are rotated."""
    rotary: Rotary | None = None
    """null: queries and keys don't depend on positions."""
    alibi: bool = False
    """Whether each head subtracts a slope times the distance of two tokens from their score (Press
    et al. 2022)."""
    bias: bool = True
    """Whether the dense layers of queries, keys, values and results have a bias."""

    @model_validator(mode="after")
    def _check_settings(self) -> Self:
        if self.key_heads is not None and self.heads % self.key_heads:
            raise ValueError(f"heads {self.heads} is not a multiple of key_heads {self.key_heads}")
        if self.rotary is not None and self.alibi:
            raise ValueError("rotary and alibi both encode positions; must be one of them")
        if not self.causal and (self.alibi or self.window is not None):
            name = "alibi" if self.alibi else f"window {self.window}"
            raise ValueError(f"{name} is for tokens before a token; causal must be true")
        return self


@component("layer")
class Conv1d(LayerSpec):
    """One-dimensional convolution of tokens (batch, tokens, features)."""

    mixes_tokens: ClassVar[bool] = True
    name: Literal["conv1d"] = "conv1d"
    features: Features
    kernel: PositiveInt
    stride: PositiveInt = 1
    padding: Literal["same", "valid", "symmetric", "causal"] | NonNegativeInt = "same"
    """causal: zeros before the first token only, so that a result reads no later token."""
    dilation: PositiveInt = 1
    groups: PositiveInt = 1
    bias: bool = False
    kernel_init: Initializer | None = None
    bias_init: Initializer | None = None

    _check_groups = model_validator(mode="after")(require_even_groups)


class Pool1d(LayerSpec):
    """Base of layers that reduce a sliding window of tokens (batch, tokens, features)."""

    mixes_tokens: ClassVar[bool] = True
    kernel: PositiveInt
    stride: PositiveInt | None = None
    """Step of the window; null: the size of the window."""
    padding: Literal["same", "valid", "symmetric"] | NonNegativeInt = "valid"

    @model_validator(mode="after")
    def _check_padding(self) -> Self:
        if isinstance(self.padding, int) and self.padding >= self.kernel:
            raise ValueError(
                f"padding {self.padding} must be less than kernel {self.kernel}, or a window would "
                "have no token"
            )
        return self


@component("layer")
class MaxPool1d(Pool1d):
    """Largest value of every window of tokens. Padding is left out."""

    name: Literal["max_pool1d"] = "max_pool1d"


@component("layer")
class AvgPool1d(Pool1d):
    """Mean of every window of tokens. Padding is left out."""

    name: Literal["avg_pool1d"] = "avg_pool1d"


class Recurrent(LayerSpec):
    """Base of layers that read tokens one after the other and keep a state of `features` values.

    Gates, their order and biases are PyTorch's. Initial weights are uniform within 1 /
    sqrt(features), as in PyTorch and MindSpore. Tokens that a mask marks as padding don't change
    the state.
    """

    mixes_tokens: ClassVar[bool] = True
    features: Features
    bidirectional: bool = False
    """Whether a second layer reads the tokens from the last to the first. The features of both
    layers are concatenated, so the result has 2 * `features`."""
    output: Literal["tokens", "last"] = "tokens"
    """tokens: the state after each token, (batch, tokens, features); last: the state after all
    tokens, (batch, features)."""
    bias: bool = True


@component("layer")
class Lstm(Recurrent):
    """Long short-term memory (Hochreiter and Schmidhuber 1997; Gers et al. 2000)."""

    name: Literal["lstm"] = "lstm"


@component("layer")
class Gru(Recurrent):
    """Gated recurrent unit (Cho et al. 2014). The reset gate multiplies state @ weights + bias."""

    name: Literal["gru"] = "gru"


@component("layer")
class MeanToken(LayerSpec):
    """The mean of all tokens that aren't padding: (batch, tokens, features) -> (batch,
    features)."""

    mixes_tokens: ClassVar[bool] = True
    name: Literal["mean_token"] = "mean_token"


@component("layer")
class FirstToken(LayerSpec):
    """Keep only the first token: (batch, tokens, features) -> (batch, features)."""

    mixes_tokens: ClassVar[bool] = True
    name: Literal["first_token"] = "first_token"
