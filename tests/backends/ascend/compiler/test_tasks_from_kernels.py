"""From graphs to tasks: multiply-adds by closed forms, laws of loops, nothing lost."""

from __future__ import annotations

from collections import Counter
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import Array, lax

from pipeline.backends.ascend.compiler.tasks_from_kernels import UnsupportedError
from pipeline.backends.ascend.pricing.traced_step import TracedStep
from tests.backends.ascend.steps import (
    ROWS,
    WIDTH,
    gradient_step,
    macs,
    nbytes,
    of,
    only,
    perceptron,
    types,
)

PRODUCT = ROWS * WIDTH * WIDTH


def test_perceptron_has_three_products_per_layer_but_the_first() -> None:
    assert macs(perceptron(3).tasks("O2")) == (3 * 3 - 1) * PRODUCT


@pytest.mark.parametrize("precision", ["O0", "O2", None])
def test_equations_are_all_counted(precision: Any) -> None:
    traced = perceptron()
    graph = traced.tasks(precision)
    assert sum(graph.primitives.values()) == traced.graph.equations
    assert graph.primitives["task"] <= len(graph.tasks) + len(graph.buffers)
    assert graph.primitives["unsupported"] == 0


def test_gradient_has_the_size_of_its_parameter() -> None:
    graph = perceptron(2).tasks("O2")
    sizes = {name: size for name, size, _ in graph.gradients}
    matrix, vector = 4 * WIDTH * WIDTH, 4 * WIDTH
    assert sizes == {"0/0/0": matrix, "0/1/0": matrix, "0/0/1": vector, "0/1/1": vector}
    for _, _, place in graph.gradients:
        assert graph.tasks[place].phase == "backward"


def test_weights_are_cast_once_a_step() -> None:
    graph = perceptron(2).tasks("O2")
    casts = only(graph, "cast")
    assert len({task.reads for task in casts}) == len(casts)
    assert all(graph.buffers[task.writes[0]].dtype == "float16" for task in casts)


def recurrent(iterations: int, recomputed: bool = False) -> TracedStep:
    """A recurrent network with a tanh."""

    def cell(weight: Array, state: Array, x: Array) -> Array:
        return jnp.tanh(jnp.tanh(state @ weight) @ weight + x)

    body = jax.checkpoint(cell) if recomputed else cell

    def forward(p: Array, xs: Array) -> Array:
        def iteration(state: Array, x: Array) -> tuple[Array, None]:
            return body(p, state, x), None

        return lax.scan(iteration, jnp.zeros((ROWS, WIDTH)), xs)[0]

    return gradient_step(forward, of(WIDTH, WIDTH), of(iterations, ROWS, WIDTH))


def test_loop_cost_is_proportional_to_its_iterations() -> None:
    short, long = (recurrent(iterations).tasks("O2") for iterations in (3, 12))
    assert macs(long) == 4 * macs(short) == 12 * 6 * PRODUCT
    assert len(long.tasks) == len(short.tasks)
    repeats = {task.type for task in long.tasks if task.repeat == 12}
    assert repeats == {task.type for task in short.tasks if task.repeat == 3}


def test_loop_invariant_values_are_prepared_once() -> None:
    graph = recurrent(12).tasks("O2")
    weight = graph.parameters[0]
    shared = [task for task in graph.tasks if task.type == "Cast" and weight in task.reads]
    assert [task.repeat for task in shared] == [1]


def test_loop_tasks_are_adjacent() -> None:
    """Memory lives as long as a loop does: tasks of one iteration are side by side."""
    repeats = [task.repeat for task in recurrent(12).tasks("O2").tasks]
    runs = sum(a != b for a, b in pairwise(repeats) if 12 in (a, b))
    assert runs == 4


def test_recomputation_adds_recomputed_tasks() -> None:
    plain, again = recurrent(4), recurrent(4, recomputed=True)
    assert macs(again.tasks("O2")) - macs(plain.tasks("O2")) == 4 * 2 * PRODUCT
    assert [name for name, _, _ in again.tasks("O2").gradients] == [""]


def test_stacked_layers_have_stacked_gradients() -> None:
    def forward(p: Array, x: Array) -> Array:
        return lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, p)[0]

    graph = gradient_step(forward, of(6, WIDTH, WIDTH), of(ROWS, WIDTH)).tasks("O2")
    assert [size for _, size, _ in graph.gradients] == [6 * 4 * WIDTH * WIDTH]
    assert macs(graph) == 6 * 3 * PRODUCT


def test_task_graph_is_independent_of_statement_order() -> None:
    def forward(order: tuple[int, ...]) -> Any:
        def function(p: Any, x: Array) -> Array:
            branches: dict[int, Array] = {}
            for index in order:
                branches[index] = (jnp.tanh, jax.nn.relu, jnp.exp)[index](x @ p[index])
            return branches[0] + branches[1] + branches[2]

        return function

    parameters = [of(WIDTH, WIDTH)] * 3
    one, other = (
        gradient_step(forward(order), parameters, of(ROWS, WIDTH)).tasks("O2")
        for order in ((0, 1, 2), (2, 0, 1))
    )
    assert Counter(task.cost_class for task in one.tasks) == Counter(
        task.cost_class for task in other.tasks
    )
    assert nbytes(one) == nbytes(other)


def test_dropout_draws_its_mask_once() -> None:
    def forward(p: Array, batch: Any) -> Array:
        hidden = jax.nn.relu(batch["x"] @ p)
        keep = jax.random.bernoulli(batch["key"], 0.5, hidden.shape)
        return jnp.where(keep, hidden / 0.5, 0.0) @ p

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = {"x": of(ROWS, WIDTH), "key": key}
    graph = gradient_step(forward, of(WIDTH, WIDTH), batch).tasks("O2")
    assert types(graph)["DropoutGenMask"] == 1
    mask = next(task.writes[0] for task in graph.tasks if task.type == "DropoutGenMask")
    assert graph.buffers[mask].nbytes == ROWS * WIDTH // 8


def test_masks_of_few_numbers_are_drawn_one_after_another() -> None:
    def forward(p: Array, batch: Any) -> Array:
        x = batch["x"]
        for key in jax.random.split(batch["key"], 3):
            keep = jax.random.bernoulli(key, 0.9, (ROWS, 1))
            x = x + (x @ p) * (keep / 0.9)
        return x

    key = jax.eval_shape(lambda: jax.random.key(0))
    batch = {"x": of(ROWS, WIDTH), "key": key}
    graph = gradient_step(forward, of(WIDTH, WIDTH), batch).tasks("O2")
    drawn = [task for task in graph.tasks if task.type == "StatelessRandomUniform"]
    assert [len(task.writes) for task in drawn] == [1, 1, 1]
    assert {task.engine for task in drawn} == {"ai_cpu"}
    assert all(graph.buffers[task.writes[0]].shape == (ROWS, 1) for task in drawn)


def unknown(p: Array, x: Array) -> Array:
    return jnp.fft.fft(x @ p).real


def test_gradient_of_mean_pooling_reads_no_zeros() -> None:
    """JAX puts zeros between the gradients, 15 x 15 a window here; AvgPoolGrad doesn't read them.

    Each gradient is added to its window: the taps are those of the forward pass.
    """

    def forward(scale: Array, images: Array) -> Array:
        windows = (1, 15, 15, 1)
        return lax.reduce_window(images * scale, 0.0, lax.add, windows, windows, "VALID")

    graph = gradient_step(forward, of(16), of(4, 60, 60, 16)).tasks("O0")
    pools = [task for task in graph.tasks if task.cost_class == "avg_pool"]
    assert [task.type for task in pools] == ["AvgPool", "AvgPoolGrad"]
    assert {(task.vector.elements, task.vector.simple) for task in pools if task.vector} == {
        (4 * 4 * 4 * 16, 15 * 15)
    }
    assert [graph.buffers[index].shape for index in pools[1].reads] == [(4, 4, 4, 16)]
    assert "PadD" not in types(graph)


def test_unknown_primitive_is_counted_or_refused() -> None:
    traced = gradient_step(unknown, of(WIDTH, WIDTH), of(ROWS, WIDTH))
    graph = traced.tasks(None)
    assert graph.unsupported["fft"] == 2
    assert graph.primitives["unsupported"] == sum(graph.unsupported.values())
    assert sum(graph.primitives.values()) == traced.graph.equations
    with pytest.raises(UnsupportedError, match=r"fft.*strict = false"):
        traced.tasks(None, strict=True)


def test_eager_graph_never_has_fewer_ops() -> None:
    for traced in (perceptron(), recurrent(3)):
        fused, single = traced.tasks("O2"), traced.tasks("O2", by_op=True)
        assert len(single.tasks) >= len(fused.tasks)
        assert macs(single) == macs(fused)
