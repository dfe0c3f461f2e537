"""Transformers: encoders of image patches (ViT) and of text (BERT), and a decoder (GPT-2)."""

from __future__ import annotations

from typing import Annotated, Literal, Self

from pydantic import Field, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.models.blocks.common_blocks import Stack
from pipeline.models.blocks.layered_model import LayeredModelSpec
from pipeline.models.layers.model_spec import Count, LayerSpec
from pipeline.models.layers.standard import (
    Conv,
    Dense,
    Dropout,
    Gelu,
    LayerNorm,
    Residual,
    Sequence,
    Tanh,
)
from pipeline.models.layers.tokens import (
    ClassToken,
    Embedding,
    FirstToken,
    PositionEmbedding,
    SelfAttention,
    TiedEmbedding,
    Tokens,
)


class Transformer(LayeredModelSpec):
    """Base of the transformers: the settings of their blocks."""

    features: PositiveInt
    """Features of each token."""
    hidden: PositiveInt
    """Hidden features of the two dense layers of a block."""
    heads: PositiveInt
    """Heads of each self-attention, which share the features evenly."""
    blocks: Count
    dropout: Annotated[float, Field(ge=0, lt=1)]

    @model_validator(mode="after")
    def _check_heads(self) -> Self:
        if self.features % self.heads:
            raise ValueError(f"features {self.features} is not a multiple of heads {self.heads}")
        return self

    def _repeat_block(self, block: Stack) -> Stack:
        return tuple(Sequence(scope=f"block{index}", body=block) for index in range(self.blocks))

    def _make_attention(self, attention_dropout: float, causal: bool = False) -> Stack:
        """Return self-attention over all tokens, and dropout."""
        attention = SelfAttention(heads=self.heads, dropout=attention_dropout, causal=causal)
        return attention, Dropout(rate=self.dropout)

    def _make_feed_forward(self, after_gelu: Stack = ()) -> Stack:
        """Return the two dense layers of each token, and dropout."""
        expand = (Dense(features=self.hidden), Gelu(), *after_gelu)
        return *expand, Dense(features=self.features), Dropout(rate=self.dropout)


@component("model")
class ViT(Transformer):
    """A class token and square patches as tokens, in blocks that normalise first.

    Dosovitskiy et al. 2021, with the tanh form of GELU.
    """

    name: Literal["vit"] = "vit"
    patch: PositiveInt
    """Height and width of a patch, in pixels."""

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        norm = LayerNorm(epsilon=1e-6)
        drop = Dropout(rate=self.dropout)
        block = (
            Residual(body=(norm, *self._make_attention(0.0))),
            Residual(body=(norm, *self._make_feed_forward((drop,)))),
        )
        size = self.patch
        patches = Conv(features=self.features, kernel=size, stride=size, padding="valid", bias=True)
        return (
            patches,
            Tokens(),
            ClassToken(),
            PositionEmbedding(),
            drop,
            *self._repeat_block(block),
            norm,
            FirstToken(),
            Dense(features=classes),
        )


@component("model")
class Bert(Transformer):
    """The encoder of BERT (Devlin et al. 2019) with its pooler, as a classifier of texts.

    A sample is an image of shape (tokens, 1, 1) whose values are token ids. All tokens are in one
    segment, without an embedding. Padding is read too, unless there is a mask
    (`dataset.padding_mask`).
    """

    name: Literal["bert"] = "bert"
    vocabulary: PositiveInt
    """Number of different tokens."""

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        norm = LayerNorm(epsilon=1e-12)
        drop = Dropout(rate=self.dropout)
        block = (
            Residual(body=self._make_attention(self.dropout)),
            norm,
            Residual(body=self._make_feed_forward()),
            norm,
        )
        return (
            Embedding(vocabulary=self.vocabulary, features=self.features),
            PositionEmbedding(shorter=True),
            norm,
            drop,
            *self._repeat_block(block),
            FirstToken(),
            Dense(scope="pooler", features=self.features),
            Tanh(),
            drop,
            Dense(features=classes),
        )


@component("model")
class Gpt(Transformer):
    """The decoder of GPT-2 (Radford et al. 2019): for every token, the logits of the next token.

    A sample is an image of shape (tokens, 1, 1) whose values are token ids. Its label is the id
    after each token, (tokens,), so the classes are the vocabulary. One table embeds and scores
    tokens. Each token reads itself and the tokens before it.
    """

    name: Literal["gpt"] = "gpt"

    def layers_for(self, classes: int) -> tuple[LayerSpec, ...]:
        norm = LayerNorm(epsilon=1e-5)
        block = (
            Residual(body=(norm, *self._make_attention(self.dropout, causal=True))),
            Residual(body=(norm, *self._make_feed_forward())),
        )
        body = (
            PositionEmbedding(shorter=True),
            Dropout(rate=self.dropout),
            *self._repeat_block(block),
            norm,
        )
        tokens = TiedEmbedding(
            scope="tokens", vocabulary=classes, features=self.features, body=body
        )
        return (tokens,)
