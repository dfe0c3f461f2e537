"""Graphs of traced functions: every equation is there, loops repeat, dead code isn't."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from pipeline.backends.graph.graph import Graph, UnboundedLoopError
from pipeline.backends.graph.tracing import make_graph
from tests.backends.ascend.steps import of


def names(graph: Graph) -> list[str]:
    return [node.primitive for node in graph.nodes]


def leaves_of(jaxpr: Any) -> int:
    """Equations that hold no other jaxpr, those of called ones included."""
    total = 0
    for eqn in jaxpr.eqns:
        inner = next(
            (eqn.params[key] for key in ("jaxpr", "call_jaxpr") if key in eqn.params), None
        )
        total += 1 if inner is None else leaves_of(getattr(inner, "jaxpr", inner))
    return total


def test_calls_are_inlined_and_every_equation_is_counted() -> None:
    @jax.jit
    def inner(x: Array) -> Array:
        return jnp.tanh(x) + 1.0

    def outer(x: Array) -> Array:
        return inner(inner(x)) * jax.nn.relu(x)

    graph = make_graph(jax.jit(outer).trace(of(8)))
    assert names(graph).count("tanh") == 2
    assert graph.equations == leaves_of(jax.make_jaxpr(outer)(jnp.ones(8)).jaxpr)
    assert graph.equations == len(graph.nodes) + graph.folded


def test_jitted_functions_are_named_by_their_nodes() -> None:
    graph = make_graph(jax.jit(lambda x: jax.nn.silu(x)).trace(of(8)))
    assert all("silu" in node.calls for node in graph.nodes)


def test_dead_and_constant_equations_are_folded() -> None:
    def function(x: Array) -> Array:
        jnp.sin(x)
        return x + jnp.tril(jnp.ones((4, 4)))

    graph = make_graph(jax.jit(function).trace(of(4, 4)))
    assert names(graph) == ["add"]
    assert graph.folded == graph.equations - 1


def test_scan_is_its_body_repeated() -> None:
    def function(x: Array, weights: Array) -> Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, weights)[0]

    graph = make_graph(jax.jit(function).trace(of(4, 8), of(5, 8, 8)))
    product = next(node for node in graph.nodes if node.primitive == "dot_general")
    assert (product.repeat, product.loop > 0) == (5, True)
    assert names(graph).count("scan_slice") == 1


def test_nested_scans_multiply_repeats() -> None:
    def inner(x: Array) -> Array:
        return lax.fori_loop(0, 3, lambda _, y: jnp.sin(y), x)

    graph = make_graph(
        jax.jit(lambda x: lax.fori_loop(0, 7, lambda _, y: inner(y), x)).trace(of(4))
    )
    assert next(node.repeat for node in graph.nodes if node.primitive == "sin") == 21


def test_values_used_only_by_the_next_iteration_are_stored() -> None:
    """The gradient of a recurrent state: the first iteration's is dropped, the others' are not."""

    def loss(weight: Array, xs: Array) -> Array:
        def iteration(state: Array, x: Array) -> tuple[Array, None]:
            return jnp.tanh(state @ weight + x), None

        return jnp.sum(lax.scan(iteration, jnp.zeros((2, 8)), xs)[0])

    graph = make_graph(jax.jit(jax.grad(loss)).trace(of(8, 8), of(5, 2, 8)))
    assert names(graph).count("dot_general") == 3


def test_counters_are_recognised_and_accumulators_are_not() -> None:
    def function(x: Array) -> tuple[Array, Array]:
        def iteration(carry: Any, _: Any) -> tuple[Any, None]:
            count, total = carry
            return (count + 1, total * 2.0 + 1.0), None

        (count, total), _ = lax.scan(iteration, (0, jnp.zeros((8,))), None, length=3)
        return total + x, count + x.astype(int)[0]

    found = names(make_graph(jax.jit(function).trace(of(8))))
    assert found.count("mul") == 1
    assert found.count("add") == 3


def test_slowest_branch_is_taken() -> None:
    def function(flag: Array, x: Array) -> Array:
        return lax.cond(flag, lambda x: x @ x @ x, lambda x: x @ x, x)

    graph = make_graph(jax.jit(function).trace(of(dtype=jnp.bool_), of(8, 8)))
    assert names(graph).count("dot_general") == 2


def test_barrier_passes_operands_through() -> None:
    def function(x: Array, y: Array) -> Array:
        x, y = lax.optimization_barrier((x, y))
        return x - y

    graph = make_graph(jax.jit(function).trace(of(4), of(4)))
    assert graph.nodes[0].inputs == graph.inputs
    assert (graph.equations, graph.folded) == (2, 1)


def test_unbounded_loop_is_refused_with_a_hint() -> None:
    def function(x: Array) -> Array:
        return lax.while_loop(lambda x: x.sum() > 0, lambda x: x - 1, x)

    def fractional(x: Array) -> Array:
        return lax.while_loop(lambda c: c[0] < 3.5, lambda c: (c[0] + 1, c[1] * 2), (0.0, x))[1]

    with pytest.raises(UnboundedLoopError, match="number of iterations"):
        make_graph(jax.jit(fractional).trace(of(8)))
    with pytest.raises(UnboundedLoopError, match=r"number of iterations .*jax\.lax\.scan"):
        make_graph(jax.jit(function).trace(of(4)))


def test_custom_max_pool_is_inlined() -> None:
    @jax.jit
    def max_pool(x: Array) -> Array:
        return lax.reduce_window(x, -jnp.inf, lax.max, (1, 2, 2, 1), (1, 2, 2, 1), "VALID")

    assert names(make_graph(jax.jit(max_pool).trace(of(1, 4, 4, 1)))) == ["reduce_window_max"]
