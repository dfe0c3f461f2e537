"""Phases, weights, gradients and device types of a step's values."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.backends.ascend.compiler.phases import choose_dtypes, find_phases
from pipeline.backends.ascend.pricing.traced_step import trace_step
from pipeline.backends.graph.tracing import make_graph
from tests.backends.ascend.steps import ROWS, WIDTH, macs, of, perceptron


def phases_of(traced: Any) -> dict[str, set[str]]:
    """The primitives of each phase."""
    graph, signature = traced.graph, traced.signature
    found: dict[str, set[str]] = {}
    phases = find_phases(graph, set(signature.parameters)).of_node
    for node, phase in zip(graph.nodes, phases, strict=True):
        found.setdefault(phase, set()).add(node.primitive)
    return found


def test_step_without_gradient_is_all_forward() -> None:
    graph = make_graph(jax.jit(lambda x: jnp.exp(x) * 2).trace(of(8)))
    assert set(find_phases(graph, ()).of_node) == {"forward"}


def test_step_has_three_phases() -> None:
    phases = phases_of(perceptron())
    assert "max" in phases["forward"]
    assert "select_n" in phases["backward"]
    assert phases["optimizer"] <= {"mul", "add", "sub"}


def test_metrics_of_the_forward_pass_are_forward() -> None:
    def step(weight: Array, batch: Array) -> tuple[Array, Array]:
        def loss(weight: Array) -> tuple[Array, Array]:
            out = batch @ weight
            return jnp.mean(out**2), out

        (_, out), gradient = jax.value_and_grad(loss, has_aux=True)(weight)
        return weight - gradient, jnp.argmax(out, -1)

    phases = phases_of(trace_step(step, of(8, 8), of(4, 8), None))
    assert "argmax" in phases["forward"]
    assert "argmax" not in phases["optimizer"]


def test_sums_of_gradients_over_a_loop_are_backward() -> None:
    def step(weight: Array, batch: Array) -> tuple[Array, None]:
        def iteration(total: Array, part: Array) -> tuple[Array, None]:
            return total + jax.grad(lambda w: jnp.sum(jnp.sin(part @ w)))(weight), None

        total, _ = lax.scan(iteration, jnp.zeros_like(weight), batch)
        return weight - 0.1 * total, None

    traced = trace_step(step, of(WIDTH, WIDTH), of(4, ROWS, WIDTH), None)
    assert "add" in phases_of(traced)["backward"]
    assert phases_of(traced)["optimizer"] == {"mul", "sub"}
    assert [name for name, _, _ in traced.tasks("O2").gradients] == [""]


def test_step_in_a_loop_has_an_optimizer_phase() -> None:
    def step(weight: Array, batch: Array) -> tuple[Array, None]:
        def iteration(weight: Array, part: Array) -> tuple[Array, None]:
            gradient = jax.grad(lambda w: jnp.sum(jnp.sin(part @ w)))(weight)
            return weight - 0.1 * gradient, None

        return lax.scan(iteration, weight, batch)

    traced = trace_step(step, of(WIDTH, WIDTH), of(4, ROWS, WIDTH), None)
    assert "sub" in phases_of(traced)["optimizer"]
    assert len(traced.signature.parameters) == 1
    assert macs(traced.tasks("O2")) == 4 * 2 * ROWS * WIDTH * WIDTH


def test_o2_halves_feature_maps_and_keeps_weights_and_gradients() -> None:
    traced = perceptron()
    graph = traced.graph
    phases = find_phases(graph, set(traced.signature.parameters))
    types = choose_dtypes(graph, phases, set(graph.inputs), "O2")
    products = [node for node in graph.nodes if node.primitive == "dot_general"]
    of_output = {types[node.outputs[0]] for node in products if node.mark == "forward"}
    assert "float16" in of_output
    assert all(types[index] == "float32" for index in phases.gradients | phases.weights)
    assert set(choose_dtypes(graph, phases, (), "O0")) <= {"float32", "bool", "int32"}
