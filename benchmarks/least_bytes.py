"""The least bytes that a training step moves, with the rule by which they are counted.

The least is the sum of what any program must move that computes no product twice and keeps nothing
in a cache between two operations:

* an activation that the backward pass needs is written once, read once forward and once backward,
  and its gradient is written and read once. These are results of products with parameters, sums of
  two activations, results of pooling and rows of tables; what is computed from them element by
  element (bias, normalisation, activation function, conversion) is computed again if it is needed.
  A product whose result goes to pooling or to a sum only is part of it. Statistics are taken while
  a result is in cache, scores of attention stay there;
* a parameter is read once forward, once backward and once by the update, which writes it; its
  gradient is written and read once; the optimizer's state is read and written once;
* the samples of a batch are read once forward and once backward, as the dataset has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pipeline.backends.graph.graph import Graph, Node
from pipeline.backends.graph.tracing import make_graph
from pipeline.data.inputs import Dataset
from pipeline.stages.build import Built
from pipeline.training.update import shape_inputs

Role = Literal["product", "product of activations", "sum", "pool", "rows"]


def count_least_bytes(built: Built, dataset: Dataset, batch_size: int) -> Counter[str]:
    """Return the least bytes that a step needs, by reason, as the module's rule says."""
    activations = sum(find_kept(*trace_network(built, batch_size)).values())
    params = _count_bytes(built.state.params)
    raw = [dataset.train.columns[array.column][:1] for array in built.step_config.inputs.arrays]
    return Counter(
        {
            "activations": 3 * activations,
            "gradients of activations": 2 * activations,
            "parameters": 4 * params,
            "gradients of parameters": 2 * params,
            "optimizer's state": 2 * _count_bytes(built.state.opt_state),
            "samples": 2 * batch_size * sum(array.nbytes for array in raw),
        }
    )


def _count_bytes(tree: Any) -> int:
    return sum(int(leaf.size * leaf.dtype.itemsize) for leaf in jax.tree.leaves(tree))


def trace_network(built: Built, batch_size: int) -> tuple[Graph, set[int]]:
    """Return the graph of the network's forward pass, and its inputs that depend on the batch."""
    config = built.step_config
    inputs = shape_inputs(config.inputs, batch_size)
    variables = {"params": built.state.params, **built.state.collections}

    def forward(variables: Any, inputs: Any) -> Any:
        mutable = [name for name in variables if name != "params"]
        rngs = {"dropout": jax.random.key(0)}
        return config.network.apply(variables, inputs, train=True, mutable=mutable, rngs=rngs)

    graph = make_graph(jax.jit(forward).trace(variables, inputs))
    return graph, set(graph.inputs[-len(jax.tree.leaves(inputs)) :])


@dataclass
class _Source:
    """A result from which others are computed element by element."""

    node: Node
    role: Role
    nbytes: int
    """Of its shortest floating-point type before anything else is computed."""
    uses: set[str] = field(default_factory=set)

    @property
    def is_kept(self) -> bool:
        if self.role == "product":
            return bool(self.uses - {"sum", "pool"})
        return self.role != "product of activations" or self.role not in self.uses


def find_kept(graph: Graph, batch: set[int]) -> dict[int, int]:
    """Return the values that a step keeps for its backward pass, by index, with their bytes."""
    roots: dict[int, frozenset[int]] = {index: frozenset() for index in batch}
    sources: dict[int, _Source] = {}
    for node in graph.nodes:
        inputs = [index for index in node.inputs if index in roots]
        if not inputs:
            continue
        read = frozenset[int]().union(*(roots[index] for index in inputs))
        role = _find_role(node, inputs, graph, roots)
        for index in read if role else ():
            sources[index].uses.add(role)
        for out in node.outputs:
            value = graph.values[out]
            nbytes = value.size * jnp.dtype(value.dtype).itemsize * node.repeat
            if role and role != "reduction":
                sources[out] = _Source(node, role, nbytes)
                roots[out] = frozenset((out,))
            else:
                roots[out] = frozenset() if role else read
            if node.primitive == "convert_element_type" and len(read) == 1:
                (index,) = read
                sources[index].nbytes = min(sources[index].nbytes, nbytes)
    for out in graph.outputs:
        for index in roots.get(out, ()):
            sources[index].uses.add("output")
    return {index: source.nbytes for index, source in sources.items() if source.is_kept}


def _find_role(
    node: Node, inputs: Sequence[int], graph: Graph, roots: Mapping[int, frozenset[int]]
) -> Role | Literal["reduction", ""]:
    """Return what a node's result is to the backward pass; "" if it is computed again."""
    if node.primitive in ("conv_general_dilated", "dot_general"):
        return "product" if len(inputs) == 1 else "product of activations"
    if node.primitive in ("max_pool", "select_and_gather_add") or "reduce_window" in node.primitive:
        return "pool"
    if node.primitive == "gather":
        return "rows"
    if node.primitive.startswith(("reduce_", "arg")):
        return "reduction"
    if node.primitive in ("add", "add_any") and len(inputs) == 2:
        left, right = inputs
        is_sum = graph.values[left].size == graph.values[right].size > 1
        if is_sum and roots[left] and roots[right] and not roots[left] & roots[right]:
            return "sum"
    return ""
