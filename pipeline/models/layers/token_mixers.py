"""Layers of tokens for large networks: experts of which a router chooses, and state spaces."""

from __future__ import annotations

from typing import Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.models.layers.model_spec import LayerSpec


@component("layer")
class MixtureOfExperts(LayerSpec):
    """Gated MLPs, the experts, of which a router chooses `top` for each token: (batch, tokens,
    features) -> the same shape (Shazeer et al. 2017; Fedus et al. 2022).

    A token's result is the sum of its experts' results, weighted by the router's softmax over the
    experts, which is divided by its sum over the chosen ones. The router computes in float32.
    """

    name: Literal["mixture_of_experts"] = "mixture_of_experts"
    experts: Annotated[int, Field(ge=2)]
    top: PositiveInt = 2
    hidden: PositiveInt
    """Features inside of an expert, as in `gated_mlp`."""
    activation: Literal["swish", "gelu", "relu", "sigmoid"] = "swish"
    capacity_factor: PositiveFloat | None = None
    """In training an expert computes at most this number times tokens * top / experts tokens of a
    sample, rounded up: the first that chose it. The others lack its result. Then a step computes as
    many tokens as that. null, and in evaluation: every expert computes every token."""
    balance: NonNegativeFloat = 0.01
    """Weight of the balance loss, which is added to the loss of each sample in training:
    experts / (top * tokens) * sum of count * probability over the experts, with the number of
    tokens that chose an expert and the router's mean probability of it (Fedus et al. 2022, eq. 4;
    for each sample separately, DeepSeek-AI 2024, V3, eq. 17). It is 1 if all are equal."""
    z_loss: NonNegativeFloat = 0.0
    """Weight of the mean over the tokens of log(Z)^2, with Z the sum of the exponentials of the
    router's logits (Zoph et al. 2022: 1e-3)."""

    @property
    def adds_losses(self) -> bool:
        return self.balance > 0 or self.z_loss > 0

    @model_validator(mode="after")
    def _check_top(self) -> Self:
        if self.top > self.experts:
            raise ValueError(f"top {self.top} is above the number of experts, {self.experts}")
        return self


@component("layer")
class StateSpace(LayerSpec):
    """The selective state-space mixer of Mamba-2 (Dao and Gu 2024): (batch, tokens, features) ->
    the same shape. A result reads no later token, and time grows in proportion to the tokens.

    A dense layer computes a gate z, inputs x of `heads` heads, B, C and step sizes dt for each
    token; a causal convolution of `kernel` tokens and Swish follow on x, B and C. Each head keeps a
    state of `head` by `state` numbers, h <- exp(dt A) h + dt x B, and returns h C + D x. Results
    times swish(z) are divided by their root mean square, and a dense layer returns to the features.
    Tokens that a mask marks as padding don't change the state.
    """

    mixes_tokens: ClassVar[bool] = True
    name: Literal["state_space"] = "state_space"
    heads: PositiveInt
    head: PositiveInt = 64
    """Features of a head."""
    state: PositiveInt = 128
    """Numbers in the state of a feature."""
    groups: PositiveInt = 1
    """Groups of heads, each with the same B and C."""
    kernel: PositiveInt = 4
    """Tokens that the convolution reads."""
    chunk: PositiveInt = 64
    """Tokens that are computed by products of matrices; states pass from chunk to chunk. It changes
    speed, memory and rounding only."""

    @model_validator(mode="after")
    def _check_groups(self) -> Self:
        if self.heads % self.groups:
            raise ValueError(f"heads {self.heads} is not a multiple of groups {self.groups}")
        return self
