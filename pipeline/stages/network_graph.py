"""Graph of a network for TensorBoard: its operations by layer, with their inputs."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
from jax.extend import core

from pipeline.core.host.jaxpr import find_called_jaxpr, interpret_jaxpr, join_scope
from pipeline.core.host.tree_paths import flatten_by_path
from pipeline.engine.monitors.tensorboard import BoardNode
from pipeline.models.modules.name_stack import find_layer
from pipeline.training.initial_state import shape_inputs
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig


def trace_network_graph(config: StepConfig, state: TrainState) -> list[BoardNode]:
    """Return the operations of a network's inference on one sample, in the order of computation.

    Names begin with the path of the layer: `conv_0/conv_general_dilated`. `state` may have shapes
    in place of arrays.
    """
    sample = shape_inputs(config.inputs, 1)
    variables = state.variables
    closed = jax.make_jaxpr(partial(config.network.apply, train=False))(variables, sample)
    trace = _Trace()
    # Paths such as `conv_0/kernel`, without the collection, in the order of the jaxpr's inputs.
    paths = [path.partition("/")[2] for path in flatten_by_path(variables)]
    weights = closed.jaxpr.invars[: len(paths)]
    pairs = zip(paths, weights, strict=True)
    inputs = [trace.add(path, "parameter", (), var) for path, var in pairs]
    # Dictionaries have their leaves in the order of the keys.
    names = sorted(array.name for array in config.inputs.arrays)
    names = names if config.inputs.is_named else ["input"]
    for name, var in zip(names, closed.jaxpr.invars[len(paths) :], strict=True):
        inputs.append(trace.add(name, "placeholder", (), var))
    (result,) = trace.add_equations(closed, inputs, "")
    trace.add("output", "identity", (result,) if result else (), closed.jaxpr.outvars[0])
    return trace.nodes


class _Trace:
    """The nodes of a graph so far, in the order of computation."""

    def __init__(self) -> None:
        self.nodes: list[BoardNode] = []
        self._name_counts: Counter[str] = Counter()

    def add(self, name: str, op: str, inputs: Sequence[str], result: Any) -> str:
        """Add a node that computes `result`; return its name, with a number if `name` is taken."""
        number = self._name_counts[name]
        self._name_counts[name] += 1
        unique = f"{name}_{number}" if number else name
        shape = tuple(getattr(result.aval, "shape", ()))
        unique_inputs = tuple(dict.fromkeys(inputs))
        self.nodes.append(BoardNode(unique, op, unique_inputs, shape, str(result.aval.dtype)))
        return unique

    def add_equations(
        self, jaxpr: core.ClosedJaxpr, inputs: Sequence[str], scope: str
    ) -> list[str]:
        """Add the operations of a jaxpr below the layer `scope`.

        Returns the names of the nodes that compute its results, "" for constants. Called functions
        are inlined. A loop or a conditional is one node.
        """
        return interpret_jaxpr(jaxpr, inputs, partial(self._add_equation, scope), lambda *_: "")

    def _add_equation(self, outer: str, equation: Any, inputs: list[str]) -> list[str]:
        """Add an equation below the layer `outer`; return the node of each of its results."""
        kind = equation.primitive.name
        scope = join_scope(equation, outer)
        called = find_called_jaxpr(equation)
        if called is not None:
            return self.add_equations(called, inputs, scope)
        name = "/".join(filter(None, (find_layer(scope), kind)))
        nodes = [node for node in inputs if node]  # without constants
        node = self.add(name, kind, nodes, equation.outvars[0])
        return [node] * len(equation.outvars)
