"""Small training steps by hand, and measures of their tasks."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import Array, lax

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.pricing.traced_step import TracedStep, trace_step

ROWS, WIDTH = 256, 128
"""Shape of the matrices: 32768 elements, more than a kernel computes again rather than keeps."""


def of(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    """An array of which only the shape is known."""
    return jax.ShapeDtypeStruct(shape, dtype)


def gradient_step(forward: Callable[[Any, Any], Array], parameters: Any, batch: Any) -> TracedStep:
    """Plain gradient descent on the mean square of `forward(parameters, batch)`."""

    def step(state: Any, batch: Any) -> tuple[Any, Array]:
        loss, gradients = jax.value_and_grad(lambda p: jnp.mean(forward(p, batch) ** 2))(state)
        return jax.tree.map(lambda p, g: p - 0.1 * g, state, gradients), loss

    return trace_step(step, parameters, batch, None)


def perceptron(layers: int = 2) -> TracedStep:
    """Layers of WIDTH with a bias and a ReLU each, then momentum."""

    def loss(parameters: Any, batch: Array) -> Array:
        for weight, bias in parameters:
            batch = jax.nn.relu(batch @ weight + bias)
        return jnp.mean(batch**2)

    def step(state: Any, batch: Array) -> tuple[Any, Array]:
        parameters, moments = state
        value, gradients = jax.value_and_grad(loss)(parameters, batch)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        parameters = jax.tree.map(lambda p, m: p - 0.1 * m, parameters, moments)
        return (parameters, moments), value

    parameters = [(of(WIDTH, WIDTH), of(WIDTH)) for _ in range(layers)]
    return trace_step(step, (parameters, parameters), of(ROWS, WIDTH), lambda state: state[0])


def normalised(x: Array, scale: Array, shift: Array, axes: tuple[int, ...]) -> Array:
    """Batch or layer normalisation, by its textbook formula."""
    mean = x.mean(axes, keepdims=True)
    variance = ((x - mean) ** 2).mean(axes, keepdims=True)
    return (x - mean) * lax.rsqrt(variance + 1e-5) * scale + shift


def macs(graph: TaskGraph) -> int:
    """Multiply-adds of all products, in all iterations."""
    return sum(task.cube.macs * task.repeat for task in graph.tasks if task.cube)


def nbytes(graph: TaskGraph) -> int:
    """Bytes that all tasks read and write, in all iterations."""
    return sum(
        task.repeat * graph.buffers[index].nbytes
        for task in graph.tasks
        for index in (*task.reads, *task.writes)
    )


def types(graph: TaskGraph) -> Counter[str]:
    """How often each type of task runs."""
    counts: Counter[str] = Counter()
    for task in graph.tasks:
        counts[task.type] += task.repeat
    return counts


def only(graph: TaskGraph, cost_class: str, phase: str | None = None) -> list[Task]:
    """The tasks of a class."""
    return [
        task
        for task in graph.tasks
        if task.cost_class == cost_class and phase in (None, task.phase)
    ]


def find_round_trips(graph: TaskGraph) -> list[str]:
    """Conversions that change no layout, or change back what the task before them changed."""
    layouts = [buffer.layout for buffer in graph.buffers]
    before: dict[int, str] = {}
    trips = []
    for task in graph.tasks:
        if task.cost_class == "trans_data":
            source, output = task.reads[0], task.writes[0]
            if layouts[output] in (layouts[source], before.get(source)):
                trips.append(task.scope)
        for output in task.writes:
            is_conversion = task.cost_class == "trans_data"
            before[output] = layouts[task.reads[0]] if is_conversion else ""
    return trips
