"""Recurrent layers: LSTM, GRU and plain ones, a scan over time for each layer and direction."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.laid import Laid, laid
from pipeline.models.torch_graph.operator_table import OperatorContext, aten
from pipeline.models.torch_graph.operators.random_ops import dropped

State = tuple[Array, ...]
Cell = Callable[[State, Array, Array, Array | None], State]
"""(state, inputs times their kernel, kernel of the state, its bias) -> state; the first array of a
state is the output."""

_TIME_FIRST = (1, 0, 2)


@dataclass(frozen=True)
class Recurrence:
    """Arguments of PyTorch's recurrent operators after their states, in their order."""

    weights: Sequence[Laid]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def lstm_cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
    """LSTM (Hochreiter and Schmidhuber 1997) with the gates input, forget, cell and output."""
    hidden, cell = state
    gates = inputs + _product(hidden, kernel, bias)
    enter, forget, new, leave = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(forget) * cell + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jax.nn.sigmoid(leave) * jnp.tanh(cell), cell


def gru_cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
    """GRU (Cho et al. 2014) with the gates reset, update and new; reset is applied after the
    product."""
    (hidden,) = state
    reset, update, new = jnp.split(inputs, 3, -1)
    own_reset, own_update, own_new = jnp.split(_product(hidden, kernel, bias), 3, -1)
    reset, update = jax.nn.sigmoid(reset + own_reset), jax.nn.sigmoid(update + own_update)
    new = jnp.tanh(new + reset * own_new)
    return ((1 - update) * new + update * hidden,)


def _plain_cell(activation: Callable[[Array], Array]) -> Cell:
    def cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
        return (activation(inputs + _product(state[0], kernel, bias)),)

    return cell


def _product(hidden: Array, kernel: Array, bias: Array | None) -> Array:
    product = hidden @ kernel.T
    return product if bias is None else product + bias


@aten("lstm.input", draws=True)
def lstm(context: OperatorContext, x: Laid, states: Sequence[Laid], *settings: Any) -> Any:
    """Outputs of the last layer, and the last hidden and cell states of all layers."""
    return _layers(context, lstm_cell, x, tuple(states), Recurrence(*settings))


@aten("gru.input", draws=True)
def gru(context: OperatorContext, x: Laid, state: Laid, *settings: Any) -> Any:
    """Outputs of the last layer, and the last states of all layers."""
    return _layers(context, gru_cell, x, (state,), Recurrence(*settings))


@aten("rnn_tanh.input", draws=True)
def rnn_tanh(context: OperatorContext, x: Laid, state: Laid, *settings: Any) -> Any:
    """Outputs of the last layer, and the last states of all layers."""
    return _layers(context, _plain_cell(jnp.tanh), x, (state,), Recurrence(*settings))


@aten("rnn_relu.input", draws=True)
def rnn_relu(context: OperatorContext, x: Laid, state: Laid, *settings: Any) -> Any:
    """Outputs of the last layer, and the last states of all layers."""
    return _layers(context, _plain_cell(jax.nn.relu), x, (state,), Recurrence(*settings))


def _layers(
    context: OperatorContext, cell: Cell, x: Laid, states: tuple[Laid, ...], settings: Recurrence
) -> tuple[Laid, ...]:
    """Stacked layers, each in one or both directions, with dropout between them."""
    directions = 2 if settings.bidirectional else 1
    num_weights = 4 if settings.has_biases else 2
    weights = settings.weights
    if len(weights) != settings.num_layers * directions * num_weights:
        raise ValueError(
            f"{len(weights)} weights for {settings.num_layers} layers; projections are not read"
        )
    batch_first = settings.batch_first
    outputs = x.plain().transpose(_TIME_FIRST) if batch_first else x.plain()
    initial = [state.plain().astype(outputs.dtype) for state in states]
    last: list[State] = []
    for layer in range(settings.num_layers):
        if layer and settings.train and settings.dropout > 0:
            key = jax.random.fold_in(context.draw(), layer)
            outputs = dropped(outputs, settings.dropout, key)
        sequences = []
        for direction in range(directions):
            at = layer * directions + direction
            used = weights[at * num_weights : (at + 1) * num_weights]
            kernels = [weight.plain().astype(outputs.dtype) for weight in used]
            start = tuple(state[at] for state in initial)
            after, sequence = _scan(cell, outputs, start, kernels, reverse=direction == 1)
            last.append(after)
            sequences.append(sequence)
        outputs = jnp.concatenate(sequences, -1)
    final = (laid(jnp.stack(parts)) for parts in zip(*last, strict=True))
    return (laid(outputs.transpose(_TIME_FIRST) if batch_first else outputs), *final)


def _scan(
    cell: Cell, x: Array, start: State, weights: Sequence[Array], reverse: bool
) -> tuple[State, Array]:
    """The last state and all outputs (time, batch, features) of one layer in one direction."""
    kernel, own_kernel, *biases = weights
    # One product for all times; those of the states depend on each other.
    inputs = x @ kernel.T
    own_bias = None
    if biases:
        inputs, own_bias = inputs + biases[0], biases[1]

    def step(state: State, now: Array) -> tuple[State, Array]:
        state = cell(state, now, own_kernel, own_bias)
        return state, state[0]

    return lax.scan(step, start, inputs, reverse=reverse)
