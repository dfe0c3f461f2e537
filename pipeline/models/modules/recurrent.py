"""The computations of the layers that read tokens one after the other, LSTM and GRU."""

from __future__ import annotations

from abc import abstractmethod
from typing import Any, ClassVar

import jax
import jax.numpy as jnp
from flax import linen as nn
from jax import Array

from pipeline.models.layers import tokens
from pipeline.models.layers.initializers import Uniform
from pipeline.models.lowerings.lowered_layers import multiply_dense
from pipeline.models.modules.apply_layers import (
    LayerContext,
    computes,
    require_mask,
    require_number,
    require_tokens,
)
from pipeline.models.modules.convolution import add_bias

State = tuple[Array, ...]
"""Arrays (batch, features). The first is the layer's result for a token."""


class _Recurrent(nn.Module):
    """Base of layers whose state after a token depends on the token and the state before it."""

    gates: ClassVar[int]
    states: ClassVar[int]
    layer: tokens.Recurrent
    context: LayerContext

    @abstractmethod
    def update_state(self, state: State, inputs: Array, products: Array) -> State:
        """Return the next state. `inputs` is token @ kernel + bias, `products` is state[0] @
        recurrent_kernel + recurrent_bias; both are (batch, gates * features)."""

    @nn.compact
    def __call__(self, x: Array) -> Array:
        require_tokens(x, self.context)
        mask = require_mask(x.shape[:2], self.context)
        result = self._read_tokens(x, mask)
        if not self.layer.bidirectional:
            return result
        return jnp.concatenate([result, self._read_tokens(x, mask, reverse=True)], -1)

    def _read_tokens(self, x: Array, mask: Array | None, *, reverse: bool = False) -> Array:
        """Return the results (batch, tokens, features), or with `output` last, the last result
        (batch, features)."""
        features = require_number(self.layer.features, self.context)
        width = self.gates * features
        prefix = "reverse_" if reverse else ""
        init = Uniform(scale=features**-0.5).build()

        def make_weight(name: str, *shape: int) -> Array:
            weight: Array = self.param(prefix + name, init, shape, jnp.float32)
            return weight

        dtype = self.context.dtype
        kernel = make_weight("kernel", x.shape[-1], width).astype(dtype)
        recurrent = make_weight("recurrent_kernel", features, width).astype(dtype)
        inputs = multiply_dense(x, kernel, self.context.policy)
        bias = None
        if self.layer.bias:
            inputs = add_bias(inputs, make_weight("bias", width))
            bias = make_weight("recurrent_bias", width)

        def read_token(state: State, token: tuple[Array, Array | None]) -> tuple[State, Any]:
            token_inputs, is_token = token
            products = state[0] @ recurrent
            if bias is not None:
                products = add_bias(products, bias)
            next_state = self.update_state(state, token_inputs, products)
            if is_token is not None:
                is_updated = is_token[:, None]
                pairs = zip(next_state, state, strict=True)
                next_state = tuple(jnp.where(is_updated, new, old) for new, old in pairs)
            return next_state, None if self.layer.output == "last" else next_state[0]

        last, results = jax.lax.scan(
            read_token,
            (jnp.zeros((x.shape[0], features), dtype),) * self.states,
            (inputs.swapaxes(0, 1), None if mask is None else mask.T),
            reverse=reverse,
        )
        return last[0] if results is None else results.swapaxes(0, 1)


@computes(tokens.Lstm)
class _Lstm(_Recurrent):
    gates: ClassVar[int] = 4
    states: ClassVar[int] = 2

    def update_state(self, state: State, inputs: Array, products: Array) -> State:
        """Return the hidden state and the cell, by input, forget, cell and output gates."""
        input_gate, forget, candidate, output = jnp.split(inputs + products, 4, -1)
        cell = jax.nn.sigmoid(forget) * state[1] + jax.nn.sigmoid(input_gate) * jnp.tanh(candidate)
        return jax.nn.sigmoid(output) * jnp.tanh(cell), cell


@computes(tokens.Gru)
class _Gru(_Recurrent):
    gates: ClassVar[int] = 3
    states: ClassVar[int] = 1

    def update_state(self, state: State, inputs: Array, products: Array) -> State:
        """Return the hidden state, by reset, update and new gates."""
        reset_x, update_x, new_x = jnp.split(inputs, 3, -1)
        reset_h, update_h, new_h = jnp.split(products, 3, -1)
        update = jax.nn.sigmoid(update_x + update_h)
        candidate = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
        return ((1 - update) * candidate + update * state[0],)
