"""Scans of GRU and LSTM cells as the vendor's ops."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, cast

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jax import Array, lax

from pipeline.backends.ascend.chip.options import ExecutionConfig
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.compiler import tasks_from_kernels
from pipeline.backends.ascend.pricing.pricing import Pricing, chipset
from pipeline.backends.ascend.pricing.traced_step import TracedStep
from pipeline.backends.ascend.published.workloads import describe_input, trace_network
from pipeline.core.registry import list_components
from pipeline.models.layers.model_spec import ModelSpec
from tests.backends.ascend.steps import gradient_step, macs, of, types

CHIP = chipset("ascend910")
Cell = Callable[[Any, Array, Array], Array]


def gru(weights: Any, state: Array, inputs: Array) -> Array:
    products = state @ weights["recurrent"]
    parts = zip(jnp.split(inputs, 3, -1), jnp.split(products, 3, -1), strict=True)
    (reset_x, reset_h), (update_x, update_h), (new_x, new_h) = parts
    update = jax.nn.sigmoid(update_x + update_h)
    candidate = jnp.tanh(new_x + jax.nn.sigmoid(reset_x + reset_h) * new_h)
    return (1 - update) * candidate + update * state


def lstm(weights: Any, state: tuple[Array, Array], inputs: Array) -> tuple[Array, Array]:
    hidden, memory = state
    enter, forget, new, leave = jnp.split(inputs + hidden @ weights["recurrent"], 4, -1)
    memory = jax.nn.sigmoid(forget) * memory + jax.nn.sigmoid(enter) * jnp.tanh(new)
    return jax.nn.sigmoid(leave) * jnp.tanh(memory), memory


def traced(kind: str, batch: int, steps: int, features: int, *, within: bool = False) -> TracedStep:
    """A step of a layer. With `within` the scan multiplies each input, else all are before it."""
    gates = 3 if kind == "gru" else 4

    def forward(weights: Any, x: Array) -> Array:
        def read(state: Any, token: Array) -> Any:
            token = token @ weights["kernel"] if within else token
            cell: Any = gru if kind == "gru" else lstm
            state = cell(weights, state, token)
            return state, state if kind == "gru" else state[0]

        x = x if within else x @ weights["kernel"]
        zero = jnp.zeros((batch, features))
        start = zero if kind == "gru" else (zero, zero)
        return lax.scan(read, start, x.swapaxes(0, 1))[1]

    weights = {
        "kernel": of(48, gates * features),
        "recurrent": of(features, gates * features),
    }
    return gradient_step(forward, weights, of(batch, steps, 48))


def priced_as_scan(step: TracedStep, monkeypatch: pytest.MonkeyPatch) -> tuple[TaskGraph, float]:
    with monkeypatch.context() as patch:
        patch.setattr(tasks_from_kernels, "find_cells", lambda *_, **__: {})
        pricing = Pricing(step, CHIP)
        graph, _ = pricing.tasks(ExecutionConfig())
        return graph, pricing.price_step(ExecutionConfig()).device_ms


@pytest.mark.parametrize(("kind", "op"), [("gru", "DynamicGRUV2"), ("lstm", "DynamicRNN")])
@pytest.mark.parametrize("within", [False, True])
def test_recurrent_layer_is_one_op_in_each_pass(kind: str, op: str, within: bool) -> None:
    graph = traced(kind, 32, 20, 64, within=within).tasks("O2")
    assert types(graph)[op] == types(graph)[f"{op}Grad"] == 1
    assert all(task.repeat == 1 for task in graph.tasks)
    assert max(task.steps for task in graph.tasks) == 20


@pytest.mark.medium
def test_fused_cell_has_the_multiply_adds_of_its_scan(monkeypatch: pytest.MonkeyPatch) -> None:
    for kind in ("gru", "lstm"):
        scan, _ = priced_as_scan(traced(kind, 32, 20, 64, within=True), monkeypatch)
        assert macs(traced(kind, 32, 20, 64, within=True).tasks("O2")) == macs(scan)


@pytest.mark.slow
@settings(max_examples=12, deadline=None)
@given(
    st.sampled_from(("gru", "lstm")),
    st.integers(1, 600),
    st.integers(1, 40),
    st.integers(8, 400),
    st.booleans(),
)
def test_fused_cell_is_never_slower_than_its_scan(
    kind: str, batch: int, steps: int, features: int, within: bool
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        _, scan_ms = priced_as_scan(traced(kind, batch, steps, features, within=within), patch)
    fused = Pricing(traced(kind, batch, steps, features, within=within), CHIP)
    assert fused.price_step(ExecutionConfig()).device_ms <= scan_ms


def test_unrecognised_cell_remains_a_scan() -> None:
    def forward(weights: Any, x: Array) -> Array:
        def read(state: Array, token: Array) -> tuple[Array, Array]:
            state = jnp.tanh(token + state @ weights)
            return state, state

        return lax.scan(read, jnp.zeros((32, 64)), x)[1]

    graph = gradient_step(forward, of(64, 64), of(20, 32, 64)).tasks("O2")
    assert not any(task.parts for task in graph.tasks)


def test_custom_cell_is_launched_call_by_call_in_eager_mode() -> None:
    graph = traced("gru", 32, 20, 64).tasks("O2", by_op=True)
    assert not any(task.parts for task in graph.tasks)
    assert sum(task.repeat for task in graph.tasks if task.launched) > 20 * 12


@pytest.mark.medium
@pytest.mark.parametrize("by_op", [False, True])
def test_framework_layer_is_one_op_in_each_direction(by_op: bool) -> None:
    layers = [
        {"name": "reshape", "shape": [12, 16]},
        {"name": "gru", "features": 32, "bidirectional": True},
        {"name": "lstm", "features": 32, "output": "last"},
        {"name": "dense", "features": "$classes"},
    ]
    init = {"conv": "he_normal", "dense": "he_uniform", "bias": "zeros"}
    fields: Any = {"name": "layers", "init": init, "layers": layers, "blocks": {}}
    network = list_components("model")["layers"].model_validate(fields)
    traced = trace_network(cast(ModelSpec, network), 16, describe_input((12, 16, 1)), 10)
    graph = traced.tasks("O2", by_op=by_op)
    ops = [task.type for task in graph.tasks if task.parts and task.launched]
    forward = ["DynamicGRUV2", "DynamicGRUV2", "DynamicRNN"]
    assert ops == forward + [f"{op}Grad" for op in reversed(forward)]
