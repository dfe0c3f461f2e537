"""Operators of sequences: attention, and recurrent layers, each a scan over time."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.models.torch_graph.operator_table import (
    OperatorContext,
    TorchTensor,
    aten,
    compute_in_float32,
    to_tensor,
)
from pipeline.models.torch_graph.operators.elementwise_ops import drop_values


@dataclass(frozen=True)
class Attention:
    """Settings of attention, in ATen's order; the last two are keyword-only."""

    dropout_p: float = 0.0
    is_causal: bool = False
    scale: float | None = field(default=None, kw_only=True)
    enable_gqa: bool = field(default=False, kw_only=True)


@aten("scaled_dot_product_attention.default", kind="self_attention", draws=True, settings=Attention)
def scaled_dot_product_attention(
    context: OperatorContext,
    query: TorchTensor,
    key: TorchTensor,
    value: TorchTensor,
    attn_mask: TorchTensor | None = None,
    settings: Attention = Attention(),
) -> TorchTensor:
    """Return softmax(query @ key^T * scale) @ value (Vaswani et al. 2017, eq. 1).

    Arrays are (..., length, features), and the softmax is computed in float32. A mask of booleans
    is true for a position that is read. A mask of numbers is added to the scores.
    """
    q, k, v = (x.plain() for x in (query, key, value))
    if settings.enable_gqa:
        k, v = (jnp.repeat(x, q.shape[-3] // x.shape[-3], -3) for x in (k, v))
    factor = 1 / math.sqrt(q.shape[-1]) if settings.scale is None else settings.scale
    scores = jnp.matmul(q * factor, jnp.swapaxes(k, -1, -2))
    mask = None if attn_mask is None else attn_mask.plain()
    if settings.is_causal:
        mask = jnp.tril(jnp.ones(scores.shape[-2:], jnp.bool_))
    if mask is not None and mask.dtype == jnp.bool_:
        scores = jnp.where(mask, scores, -jnp.inf)
    elif mask is not None:
        scores += mask.astype(scores.dtype)
    weights = compute_in_float32(jax.nn.softmax, scores)
    if settings.dropout_p > 0:
        weights = drop_values(weights, settings.dropout_p, context.draw_key())
    return to_tensor(jnp.matmul(weights, v))


State = tuple[Array, ...]
Cell = Callable[[State, Array, Array, Array | None], State]
"""(state, inputs @ their kernel + bias, the state's kernel, the state's bias) -> the next state,
whose first array is the output."""

_TIME_FIRST = (1, 0, 2)


@dataclass(frozen=True)
class Recurrence:
    """Arguments of PyTorch's recurrent operators after their states, in their order."""

    weights: Sequence[TorchTensor]
    has_biases: bool
    num_layers: int
    dropout: float
    train: bool
    bidirectional: bool
    batch_first: bool


def lstm_cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
    """Compute a step of an LSTM (Hochreiter and Schmidhuber 1997).

    The gates are input, forget, cell and output.
    """
    hidden, cell = state
    gates = inputs + _multiply(hidden, kernel, bias)
    input_gate, forget_gate, candidate, output_gate = jnp.split(gates, 4, -1)
    cell = jax.nn.sigmoid(forget_gate) * cell + jax.nn.sigmoid(input_gate) * jnp.tanh(candidate)
    return jax.nn.sigmoid(output_gate) * jnp.tanh(cell), cell


def gru_cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
    """Compute a step of a GRU (Cho et al. 2014) with the reset after the product of the new state.

    The gates are reset, update and new.
    """
    (hidden,) = state
    x_reset, x_update, x_new = jnp.split(inputs, 3, -1)
    h_reset, h_update, h_new = jnp.split(_multiply(hidden, kernel, bias), 3, -1)
    reset = jax.nn.sigmoid(x_reset + h_reset)
    update = jax.nn.sigmoid(x_update + h_update)
    new = jnp.tanh(x_new + reset * h_new)
    return ((1 - update) * new + update * hidden,)


def gru_reset_first_cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
    """Compute a step of a GRU as its paper does, with the reset before the product."""
    (hidden,) = state
    num_gate_values = 2 * hidden.shape[-1]
    x_gates, x_new = jnp.split(inputs, [num_gate_values], -1)
    gate_kernel, new_kernel = jnp.split(kernel, [num_gate_values])
    gate_bias, new_bias = (None, None) if bias is None else jnp.split(bias, [num_gate_values])
    gates = jax.nn.sigmoid(x_gates + _multiply(hidden, gate_kernel, gate_bias))
    reset, update = jnp.split(gates, 2, -1)
    new = jnp.tanh(x_new + _multiply(reset * hidden, new_kernel, new_bias))
    return ((1 - update) * new + update * hidden,)


def _make_plain_cell(activation: Callable[[Array], Array]) -> Cell:
    def cell(state: State, inputs: Array, kernel: Array, bias: Array | None) -> State:
        return (activation(inputs + _multiply(state[0], kernel, bias)),)

    return cell


def _multiply(hidden: Array, kernel: Array, bias: Array | None) -> Array:
    product = hidden @ kernel.T
    return product if bias is None else product + bias


CELLS: Mapping[str, Cell] = {
    "lstm": lstm_cell,
    "gru": gru_cell,
    "gru_reset_first": gru_reset_first_cell,
    "rnn_tanh": _make_plain_cell(jnp.tanh),
    "rnn_relu": _make_plain_cell(jax.nn.relu),
}


def _project(cell: Cell, kernel: Array) -> Cell:
    """Return a cell whose output is multiplied by a kernel (out, in) (Sak et al. 2014)."""

    def compute(state: State, inputs: Array, state_kernel: Array, bias: Array | None) -> State:
        hidden, *others = cell(state, inputs, state_kernel, bias)
        return _multiply(hidden, kernel, None), *others

    return compute


def _register_cell(name: str, cell: Cell) -> None:
    """Register one step of a recurrent layer."""

    @aten(name)
    def step(
        x: TorchTensor,
        states: TorchTensor | tuple[TorchTensor, ...],
        kernel: TorchTensor,
        state_kernel: TorchTensor,
        *biases: TorchTensor | None,
    ) -> TorchTensor | tuple[TorchTensor, ...]:
        inputs = x.plain()
        listed = states if isinstance(states, tuple) else (states,)
        start = tuple(state.plain().astype(inputs.dtype) for state in listed)
        bias, state_bias = (None if b is None else b.plain() for b in (*biases, None, None)[:2])
        end = cell(start, _multiply(inputs, kernel.plain(), bias), state_kernel.plain(), state_bias)
        results = tuple(map(to_tensor, end))
        return results if isinstance(states, tuple) else results[0]


for _operator, _cell in (
    ("lstm_cell.default", lstm_cell),
    ("gru_cell.default", gru_cell),
    ("rnn_tanh_cell.default", CELLS["rnn_tanh"]),
    ("rnn_relu_cell.default", CELLS["rnn_relu"]),
):
    _register_cell(_operator, _cell)


def _compute_layers(
    cell: Cell,
    context: OperatorContext,
    x: TorchTensor,
    states: TorchTensor | tuple[TorchTensor, ...],
    settings: Recurrence,
) -> tuple[TorchTensor, ...]:
    """Compute stacked layers; return the last layer's outputs and all layers' last states."""
    states = states if isinstance(states, tuple) else (states,)
    directions = 2 if settings.bidirectional else 1
    weights = settings.weights
    num_weights = len(weights) // (settings.num_layers * directions)
    if num_weights not in ((4, 5) if settings.has_biases else (2, 3)):
        raise ValueError(f"{len(weights)} weights for {settings.num_layers} layers")
    batch_first = settings.batch_first
    outputs = x.plain().transpose(_TIME_FIRST) if batch_first else x.plain()
    initial = [state.plain().astype(outputs.dtype) for state in states]
    last: list[State] = []
    for layer in range(settings.num_layers):
        if layer and settings.train and settings.dropout > 0:
            key = jax.random.fold_in(context.draw_key(), layer)
            outputs = drop_values(outputs, settings.dropout, key)
        sequences = []
        for direction in range(directions):
            index = layer * directions + direction
            layer_weights = weights[index * num_weights : (index + 1) * num_weights]
            arrays = [weight.plain().astype(outputs.dtype) for weight in layer_weights]
            start = tuple(state[index] for state in initial)
            has_projection = num_weights % 2 == 1
            layer_cell = _project(cell, arrays.pop()) if has_projection else cell
            end, sequence = _scan(layer_cell, outputs, start, arrays, reverse=direction == 1)
            last.append(end)
            sequences.append(sequence)
        outputs = jnp.concatenate(sequences, -1)
    final = [to_tensor(jnp.stack([state[i] for state in last])) for i in range(len(states))]
    return (to_tensor(outputs.transpose(_TIME_FIRST) if batch_first else outputs), *final)


for _name, _cell in CELLS.items():
    aten(f"{_name}.input", draws=True, settings=Recurrence)(partial(_compute_layers, _cell))


def _scan(
    cell: Cell, x: Array, start: State, weights: Sequence[Array], reverse: bool
) -> tuple[State, Array]:
    """Return the last state and all outputs (time, batch, features) of a layer in one direction."""
    kernel, state_kernel, *biases = weights
    # One product for the inputs of all times. The products of states depend on each other.
    inputs = _multiply(x, kernel, biases[0] if biases else None)
    state_bias = biases[1] if biases else None

    def step(state: State, step_inputs: Array) -> tuple[State, Array]:
        state = cell(state, step_inputs, state_kernel, state_bias)
        return state, state[0]

    return lax.scan(step, start, inputs, reverse=reverse)
