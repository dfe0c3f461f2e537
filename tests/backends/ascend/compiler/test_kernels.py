"""Primitives that share a kernel, by the tasks and by what they read and write."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest
from jax import Array

from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.pricing.traced_step import TracedStep, trace_step
from pipeline.backends.ascend.published.workloads import trace_image_step
from tests.backends.ascend.steps import ROWS, WIDTH, gradient_step, normalised, of, only, types

ELEMENTS = ROWS * WIDTH


def reads_of(graph: TaskGraph, cost_class: str, phase: str) -> list[int]:
    """How many whole matrices each kernel of a class reads."""
    return [
        sum(len(graph.buffers[index].shape) > 1 for index in task.reads)
        for task in only(graph, cost_class, phase)
    ]


def test_layer_norm_is_one_kernel_forward_and_two_backward() -> None:
    def forward(p: Any, x: Array) -> Array:
        return normalised(x @ p["w"], p["g"], p["b"], (1,)) @ p["w"]

    shapes = {"w": of(WIDTH, WIDTH), "g": of(WIDTH), "b": of(WIDTH)}
    graph = gradient_step(forward, shapes, of(ROWS, WIDTH)).tasks("O2")
    assert types(graph)["LayerNorm"] == 1
    assert types(graph)["LayerNormXBackprop"] == 1
    assert types(graph)["LayerNormBetaGammaBackprop"] == 1
    assert reads_of(graph, "rows", "forward") == [1]
    assert reads_of(graph, "rows", "backward") == [2]


@pytest.mark.parametrize("pieces", [1, 4])
def test_rows_of_a_norm_are_those_of_its_sum(pieces: int) -> None:
    """A norm may read a view of shorter rows, such as tokens that are normalised together."""

    def forward(p: Any, x: Array) -> Array:
        rows = x.reshape(2, ROWS // 2, pieces, -1).swapaxes(0, 1).reshape(ROWS, WIDTH)
        return normalised(rows, p["g"], p["b"], (1,)) @ p["w"]

    shapes = {"g": of(WIDTH), "b": of(WIDTH), "w": of(WIDTH, WIDTH)}
    graph = gradient_step(forward, shapes, of(ROWS, WIDTH)).tasks("O2")
    (norm,) = only(graph, "rows")
    assert max(graph.buffers[index].shape[-1] for index in norm.reads[2:]) == WIDTH // pieces
    assert norm.vector is not None
    assert norm.vector.rows == ROWS


def test_batch_norm_has_two_kernels_per_pass() -> None:
    def forward(p: Any, x: Array) -> Array:
        normal = normalised(x @ p["w"], p["g"], p["b"], (0,))
        return jax.nn.relu(normal) @ p["w"]

    shapes = {"w": of(WIDTH, WIDTH), "g": of(WIDTH), "b": of(WIDTH)}
    graph = gradient_step(forward, shapes, of(ROWS, WIDTH)).tasks("O2")
    assert types(graph)["BNTrainingUpdate"] == 1
    assert reads_of(graph, "bn_update", "forward") == [1]
    assert types(graph)["BNTrainingUpdateGrad"] == 1
    assert reads_of(graph, "bn_update", "backward") == [2]
    assert reads_of(graph, "bn_reduce", "backward") == [2]


@pytest.mark.slow
def test_batch_norm_scale_gradient_is_available_to_all_reduce() -> None:
    """The backward pass reads it on, and still it is there for the all-reduce."""
    traced = trace_image_step("resnet20", 8, 32, 10)
    graph = traced.tasks("O2")
    norms = sum(name.endswith("/scale") for name in traced.signature.parameters.values())
    assert {name for name, *_ in graph.gradients} == {*traced.signature.parameters.values()}
    assert sum(buffer.role == "gradient" for buffer in graph.buffers) >= len(graph.gradients)
    assert types(graph)["FusedDbnDw"] == norms
    assert not types(graph)["ApplyAdam"]


def test_softmax_has_one_kernel_per_pass() -> None:
    def forward(p: Array, x: Array) -> Array:
        return jax.nn.softmax(x @ p) @ p

    graph = gradient_step(forward, of(WIDTH, WIDTH), of(ROWS, WIDTH)).tasks("O2")
    assert (types(graph)["SoftmaxV2"], types(graph)["SoftmaxGrad"]) == (1, 1)
    (softmax,) = only(graph, "rows", "forward")
    assert softmax.vector is not None
    assert softmax.vector.along_rows == 4  # maximum, difference, sum, quotient


def test_shared_normalised_map_is_written_once() -> None:
    """Batch normalisation before squeeze-and-excitation: its result is read, not its input."""

    def forward(p: Any, x: Array) -> Array:
        with jax.named_scope("norm"):
            y = normalised(x @ p["w"], p["g"], p["b"], (0, 1))
        with jax.named_scope("gate"):
            y = y * jax.nn.sigmoid(y.mean(1) @ p["w"])[:, None]
        return y @ p["w"]

    shapes = {"w": of(WIDTH, WIDTH), "g": of(WIDTH), "b": of(WIDTH)}
    graph = gradient_step(forward, shapes, of(8, ROWS, WIDTH)).tasks("O2")
    (update,) = only(graph, "bn_update", "forward")
    readers = [task for task in graph.tasks if update.writes[0] in task.reads]
    assert {task.phase for task in readers} == {"forward", "backward"}
    (product,) = (
        task for task in graph.tasks if set(task.writes) & set(update.reads) and task.cube
    )
    maps = {index for index in product.writes if len(graph.buffers[index].shape) == 3}
    means = [task for task in only(graph, "reduce", "forward") if maps.intersection(task.reads)]
    assert not means


def test_cross_entropy_reads_its_logits_once_per_pass() -> None:
    def step(weight: Array, batch: Any) -> tuple[Array, Array]:
        def loss(weight: Array) -> Array:
            logits = batch[0] @ weight
            return optax.softmax_cross_entropy_with_integer_labels(logits, batch[1]).mean()

        value, gradient = jax.value_and_grad(loss)(weight)
        return weight - gradient, value

    batch = (of(ROWS, WIDTH), of(ROWS, dtype=jnp.int32))
    graph = trace_step(step, of(WIDTH, WIDTH), batch, None).tasks("O2")
    assert reads_of(graph, "rows", "forward") == [1]
    assert reads_of(graph, "rows", "backward") == [1]


def optimised(transformation: Any) -> TracedStep:
    """A step of two matrices and an optimizer of optax."""
    parameters = {"a": of(WIDTH, ROWS), "b": of(ROWS, WIDTH)}

    def step(state: Any, batch: Array) -> tuple[Any, Array]:
        parameters, moments = state

        def loss(p: Any) -> Array:
            return jnp.mean((batch @ p["a"] @ p["b"]) ** 2)

        value, gradients = jax.value_and_grad(loss)(parameters)
        updates, moments = transformation.update(gradients, moments, parameters)
        return (optax.apply_updates(parameters, updates), moments), value

    moments = jax.eval_shape(transformation.init, parameters)
    return trace_step(step, (parameters, moments), of(ROWS, WIDTH), lambda state: state[0])


@pytest.mark.parametrize(
    ("transformation", "streams"),
    [(optax.sgd(0.1), 3), (optax.sgd(0.1, momentum=0.9), 5), (optax.adam(0.1), 7)],
)
def test_optimizer_update_reads_and_writes_each_moment_once(
    transformation: Any, streams: int
) -> None:
    graph = optimised(transformation).tasks("O2")
    updates = [task for task in only(graph, "optimizer") if len(task.writes) * 2 + 1 >= streams]
    whole = [
        sum(
            graph.buffers[index].nbytes
            for index in (*task.reads, *task.writes)
            if len(graph.buffers[index].shape) > 1
        )
        for task in updates
    ]
    assert whole == [streams * 4 * ELEMENTS] * 2


@pytest.mark.parametrize(
    "transformation",
    [
        optax.lamb(0.1),
        optax.chain(optax.clip_by_global_norm(1.0), optax.adamw(0.1)),
        optax.adafactor(0.1),
        optax.rmsprop(0.1, momentum=0.9),
    ],
)
def test_gradients_are_recognised_with_every_optimizer(transformation: Any) -> None:
    graph = optimised(transformation).tasks("O2")
    assert sorted(name for name, _, _ in graph.gradients) == ["0/a", "0/b"]
    assert all(size == 4 * ELEMENTS for _, size, _ in graph.gradients)


def test_tasks_follow_the_producers_of_their_inputs() -> None:
    graph = optimised(optax.lamb(0.1)).tasks("O2")
    written = {*graph.parameters, *graph.state}
    for task in graph.tasks:
        made = {index for each in graph.tasks for index in each.writes}
        assert all(index in written or index not in made for index in task.reads)
        written.update(task.writes)


@pytest.mark.slow
def test_long_chains_are_split_and_lowered_fast() -> None:
    def forward(p: Array, x: Array) -> Array:
        for _ in range(1500):
            x = jnp.sin(x * p) + 1.0
        return x

    traced = gradient_step(forward, of(WIDTH), of(ROWS, WIDTH))
    began = time.process_time()
    graph = traced.tasks("O2")
    assert time.process_time() - began < 15
    assert max(len(task.fused) for task in graph.tasks) < 20
    assert len(only(graph, "elementwise", "forward")) >= 1500 * 3 // 100
