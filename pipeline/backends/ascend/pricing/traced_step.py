"""A training step as a graph, traced once and lowered once for each precision."""

from __future__ import annotations

import gc
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import lru_cache
from operator import attrgetter
from typing import Any

import jax

from pipeline.backends.ascend.chip.hardware import PricedChip
from pipeline.backends.ascend.chip.options import Precision
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.compiler.phases import TracedSignature
from pipeline.backends.ascend.compiler.primitives import classify_primitive
from pipeline.backends.ascend.compiler.tasks_from_kernels import LoweringOptions, lower
from pipeline.backends.ascend.cost.efficiency import Calibration
from pipeline.backends.ascend.memory.memory_plan import MemoryPlan
from pipeline.backends.ascend.simulate.timeline import Timeline
from pipeline.backends.graph.graph import Graph
from pipeline.backends.graph.tracing import make_graph
from pipeline.core.errors import RunError
from pipeline.core.host.array_values import get_stored_bytes
from pipeline.core.host.tree_paths import flatten_by_path, list_leaf_paths

Step = Callable[[Any, Any], tuple[Any, Any]]
get_params = attrgetter("params")
"""Returns the trained leaves of a `TrainState`."""
MAX_CACHED_TRACES = 16
MAX_CACHED_CHIPS = 4


@dataclass(frozen=True)
class Results:
    """Priced tasks, timelines and memory plans of a step on a chip, by their options."""

    tasks: dict[Any, tuple[TaskGraph, tuple[TaskTime, ...]]] = field(default_factory=dict)
    timelines: dict[Any, Timeline] = field(default_factory=dict)
    memory: dict[Any, MemoryPlan] = field(default_factory=dict)


class TracedStep:
    """The graph of `step(state, batch) -> (state, result)`, and the roles of its inputs."""

    def __init__(self, graph: Graph, signature: TracedSignature) -> None:
        self.graph = graph
        self.signature = signature
        self._lowered: dict[LoweringOptions, TaskGraph] = {}
        self.get_results = lru_cache(MAX_CACHED_CHIPS)(_make_results)
        """Returns the results of the step on a chip: those so far for the last few chips."""

    @property
    def batch_bytes(self) -> int:
        """Bytes of a batch as it is copied to the device."""
        values = (self.graph.values[index] for index in self.signature.inputs)
        return round(sum(value.size * get_stored_bytes(value.dtype) for value in values))

    @property
    def batch_size(self) -> int:
        """The first axis of the largest input of a batch; 1 without inputs."""
        values = [self.graph.values[index] for index in self.signature.inputs]
        largest = max(values, key=lambda value: value.size, default=None)
        return largest.shape[0] if largest is not None and largest.shape else 1

    @property
    def batch_pixels(self) -> int | None:
        """Height x width of the images in a batch; None if no input has four axes."""
        for index in self.signature.inputs:
            shape = self.graph.values[index].shape
            if len(shape) == 4:
                sides = shape[1:3] if shape[3] <= shape[1] else shape[2:4]
                return sides[0] * sides[1]
        return None

    def tasks(self, precision: Precision | None, **options: Any) -> TaskGraph:
        """Return the tasks of the step. `options` are other fields of `LoweringOptions`."""
        return self.lower(LoweringOptions(precision, **options))

    def lower(self, options: LoweringOptions) -> TaskGraph:
        """Return the tasks of the step, cached by the options."""
        if options not in self._lowered:
            self._lowered[options] = lower(self.graph, self.signature, options)
        return self._lowered[options]


def _make_results(chip: PricedChip, calibration: Calibration) -> Results:
    return Results()


def trace_step(
    step: Step, state: Any, batch: Any, parameters: Callable[[Any], Any] | None
) -> TracedStep:
    """Trace a step from shapes. The last few traces are cached by function and shapes.

    Raises RunError if the step doesn't return (state, result) with a state like its input, or if
    `parameters` returns leaves that the state doesn't have.
    """
    leaves, tree = jax.tree.flatten((state, batch))
    shapes = tuple(map(_to_shape, leaves))
    try:
        hash((step, tree, parameters))
    except TypeError:
        return _trace(step, tree, shapes, parameters)
    return _cached_trace(step, tree, shapes, parameters)


def _to_shape(leaf: Any) -> jax.ShapeDtypeStruct:
    if not hasattr(leaf, "dtype") and isinstance(leaf, (bool, int, float, complex)):
        leaf = jax.numpy.asarray(leaf)
    if hasattr(leaf, "shape") and hasattr(leaf, "dtype"):
        return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype)
    raise RunError(
        f"state or batch holds {leaf!r}; its leaves must be arrays, numbers or ShapeDtypeStructs"
    )


@contextmanager
def pause_garbage_collection() -> Iterator[None]:
    """Switch garbage collection off: tracing creates millions of objects, all in use.

    Pricing ResNet-50 takes 0.85 times as long without garbage collection.
    """
    was_on = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_on:
            gc.enable()


def _trace(
    step: Step, tree: Any, shapes: tuple[Any, ...], parameters: Callable[[Any], Any] | None
) -> TracedStep:
    state, batch = jax.tree.unflatten(tree, shapes)
    with pause_garbage_collection():
        # A step may be a callable without a hash, which jax.jit doesn't accept.
        traced = jax.jit(lambda state, batch: step(state, batch)).trace(state, batch)
        graph = make_graph(traced)
    result = traced.out_info
    if not isinstance(result, tuple) or len(result) != 2:
        raise RunError(f"step returns {type(result).__name__}; it must return (state, result)")
    if _describe_leaves(state) and _describe_leaves(result) == _describe_leaves(state):
        raise RunError("step returns its state alone; it must return (state, result)")
    _check_same(_describe_leaves(state), _describe_leaves(result[0]))
    return TracedStep(graph, _make_signature(graph, state, batch, parameters))


_cached_trace = lru_cache(maxsize=MAX_CACHED_TRACES)(_trace)


def _check_same(before: Mapping[str, str], after: Mapping[str, str]) -> None:
    """Raise RunError unless a new state has the leaves of the old state."""
    if list(after.items()) == list(before.items()):
        return
    problem = "in another order"
    for name in (*before, *after):
        if after.get(name) != before.get(name):
            old = before.get(name, "nothing")
            new = after.get(name, "nothing")
            problem = f"with {new} as {name or 'its array'}, which was {old}"
            break
    raise RunError(
        f"step returns its state {problem}; it must return (state, result) with a new state of the "
        "structure, shapes and types of the old one"
    )


def _make_signature(
    graph: Graph, state: Any, batch: Any, parameters: Callable[[Any], Any] | None
) -> TracedSignature:
    paths = list_leaf_paths(state)
    count = len(paths)
    state_names = dict(zip(graph.inputs, paths, strict=False))
    names = (f"batch/{path}".rstrip("/") for path in list_leaf_paths(batch))
    inputs = dict(zip(graph.inputs[count:], names, strict=True))
    updates = dict(zip(graph.outputs[:count], graph.inputs[:count], strict=True))
    trained = _find_trained(graph, state, state_names, updates, parameters)
    return TracedSignature(
        parameters={index: name for index, name in state_names.items() if index in trained},
        state={index: name for index, name in state_names.items() if index not in trained},
        inputs=inputs,
        updates=updates,
    )


def _describe_leaves(tree: Any) -> dict[str, str]:
    """Return the type and shape of each leaf by its path, which is the same in lists and tuples."""
    leaves = flatten_by_path(tree)
    return {path: f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves.items()}


def _find_trained(
    graph: Graph,
    state: Any,
    state_names: Mapping[int, str],
    updates: Mapping[int, int],
    parameters: Callable[[Any], Any] | None,
) -> set[int]:
    """Return the leaves from `parameters`, else those that the loss reads and the step changes."""
    if parameters is not None:
        numbered = jax.tree.unflatten(jax.tree.structure(state), list(state_names))
        picked = set(jax.tree.leaves(parameters(numbered)))
        if not picked or not picked <= set(state_names):
            raise RunError(
                "parameters picks no leaf of the state; it must return some, such as state.params"
            )
        return picked
    read_values = _find_loss_inputs(graph)
    updated_values = _find_updated_values(graph)
    return {
        into
        for out, into in updates.items()
        if into in state_names and into in read_values and out in updated_values
    }


def _find_loss_inputs(graph: Graph) -> set[int]:
    """Return the values that marked forward nodes read, directly or through views and casts."""
    read_values: set[int] = set()
    for node in reversed(graph.nodes):
        passes_on = classify_primitive(node.primitive) in ("view", "loop_view")
        passes_on = passes_on or node.primitive == "convert_element_type"
        if node.mark == "forward" or (passes_on and not read_values.isdisjoint(node.outputs)):
            read_values.update(node.inputs)
    return read_values


def _find_updated_values(graph: Graph) -> set[int]:
    """Return float values that are computed from gradients.

    Running statistics aren't among them, as they are computed from the forward pass, nor is a loss
    scale, which depends only on whether gradients are finite.
    """
    result: set[int] = set()
    for node in graph.nodes:
        if node.mark == "backward" or any(index in result for index in node.inputs):
            floats = (out for out in node.outputs if "float" in graph.values[out].dtype)
            result.update(floats)
    return result
