"""A loss and its gradients as a graph, and the blocks that a plan decides about: regions of
activations, operators between them, weights."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import chain
from operator import attrgetter
from typing import Any, Literal

import jax
import jax.numpy as jnp

from pipeline.backends.graph.graph import Graph, Node, find_live
from pipeline.backends.graph.tracing import make_graph
from pipeline.backends.planner.dimension_groups import PRODUCTS, REDUCTIONS
from pipeline.core.host.array_values import get_stored_bytes
from pipeline.core.host.tree_paths import list_leaf_paths
from pipeline.training.forward_pass import apply_network, compute_loss
from pipeline.training.losses import compute_divisor
from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig

VIEWS = frozenset(
    {"reshape", "squeeze", "stop_gradient", "broadcast_in_dim", "transpose", "copy", "expand_dims"}
)
"""Operations whose result is treated as the operand in another shape, without its own memory."""
MOVES = frozenset({*VIEWS, *REDUCTIONS, "convert_element_type"})
"""Operations whose result, if it has the size of the operand, is the same gradient."""


@dataclass(frozen=True)
class LossToPlan:
    """A loss to plan for: a pure function and the shapes of its arguments."""

    name: str
    loss: Callable[[Any, Any], Any]
    """`loss(params, batch)` returns a scalar."""
    params: Any
    """Tree of `jax.ShapeDtypeStruct`."""
    batch: Any
    """Tree of `jax.ShapeDtypeStruct`: the batch of all devices together."""
    state_bytes: int = 0
    """Size of the optimizer's state, which is sharded like the parameters."""
    sync_batch_norm: bool = False
    """Whether batch normalisation sums over the samples of all devices, as XLA does."""


class TracedLoss:
    """The graph of a loss and its gradients. Values and nodes are indices.

    * `params`, `batch`: paths of the arguments by value.
    * `varying`: values that depend on the batch or on random numbers.
    * `made_of`: by value, the parameters that it depends on.
    * `forward`: nodes of the forward pass.
    * `operators`: by node, operand and weight of a product with a parameter, or a look-up of rows.
    """

    def __init__(self, step: LossToPlan) -> None:
        traced = jax.jit(jax.value_and_grad(step.loss)).trace(step.params, step.batch)
        self.graph: Graph = make_graph(traced)
        names = list_leaf_paths(step.params)
        self.params = dict(zip(self.graph.inputs, names, strict=False))
        self.batch = dict(
            zip(self.graph.inputs[len(names) :], list_leaf_paths(step.batch), strict=True)
        )
        self.varying = set(self.batch)
        self.made_of = {index: frozenset([index]) for index in self.params}
        self._follow_inputs()
        self.forward = self._find_forward_nodes()
        self.operators = dict(self._find_operators())

    def list_forward_values(self) -> Iterator[int]:
        """Yield the batch, and the values of the forward pass that depend on it, in their order."""
        yield from self.batch
        for index in sorted(self.forward):
            yield from (out for out in self.graph.nodes[index].outputs if out in self.varying)

    def get_shape(self, value: int) -> tuple[int, ...]:
        return self.graph.values[value].shape

    def count_bytes(self, value: int) -> int:
        """Return the bytes of a value in memory. A mask takes a bit per element."""
        stored = self.graph.values[value]
        return math.ceil(stored.size * get_stored_bytes(stored.dtype))

    def find_saved_values(self) -> list[int]:
        """Return the values of the batch and the forward pass that operators or the backward pass
        read; for a view, the value that it is a view of."""
        nodes = self.graph.nodes
        maker = {out: node for node in nodes for out in node.outputs}
        produced = {out for index in self.forward for out in nodes[index].outputs}
        saved: set[int] = set()
        for index, node in enumerate(nodes):
            if index in self.forward and index not in self.operators:
                continue
            for value in node.inputs:
                while value in maker and maker[value].primitive in VIEWS:
                    value = maker[value].inputs[0]
                if value in self.varying and (value in produced or value in self.batch):
                    saved.add(value)
        return sorted(saved)

    def find_gradients(self) -> set[int]:
        """Return the gradients of parameters, and the values that they are rearranged from."""
        gradients = set(self.graph.outputs[1:])
        for node in reversed(self.graph.nodes):
            if node.primitive in MOVES and not gradients.isdisjoint(node.outputs):
                values = self.graph.values
                if values[node.inputs[0]].size == values[node.outputs[0]].size:
                    gradients.update(node.inputs)
        return gradients

    def _follow_inputs(self) -> None:
        """Find the values that depend on parameters or the batch."""
        for node in self.graph.nodes:
            made_of = (self.made_of.get(value, ()) for value in node.inputs)
            params = frozenset(chain.from_iterable(made_of))
            if params:
                self.made_of |= dict.fromkeys(node.outputs, params)
            if not self.varying.isdisjoint(node.inputs) or "random" in node.primitive:
                self.varying.update(node.outputs)

    def _find_forward_nodes(self) -> set[int]:
        """Return the nodes that the loss depends on, and the nodes that JAX marks as forward."""
        live = find_live(self.graph, self.graph.outputs[:1])
        return {
            index
            for index, node in enumerate(self.graph.nodes)
            if node.mark == "forward" or not live.isdisjoint(node.outputs)
        }

    def _find_operators(self) -> Iterator[tuple[int, tuple[int, int]]]:
        """Yield the node, operand and weight of each operator."""
        for index in sorted(self.forward):
            node = self.graph.nodes[index]
            if node.primitive == "dot_general":
                left, right = node.inputs
                if self._is_weight(right) and left in self.varying:
                    yield index, (left, right)
                elif self._is_weight(left) and right in self.varying:
                    yield index, (right, left)
            elif node.primitive in PRODUCTS:
                if self._is_weight(node.inputs[1]) and node.inputs[0] in self.varying:
                    yield index, (node.inputs[0], node.inputs[1])
            elif node.primitive == "gather" and self._is_row_lookup(node):
                yield index, (node.inputs[1], node.inputs[0])

    def _is_weight(self, value: int) -> bool:
        return value in self.made_of and value not in self.varying

    def _is_row_lookup(self, node: Node) -> bool:
        """Return whether a gather looks up complete rows of a parameter, each by one index."""
        numbers = node.params["dimension_numbers"]
        rank = len(self.get_shape(node.outputs[0]))
        rows = tuple(numbers.start_index_map) == (0,) and tuple(numbers.offset_dims) == (rank - 1,)
        return rows and self._is_weight(node.inputs[0]) and node.inputs[1] in self.varying


def make_loss(
    name: str,
    config: StepConfig,
    state: TrainState,
    batch: tuple[Any, Any],
    *,
    sync_batch_norm: bool = False,
) -> LossToPlan:
    """Return the loss of a step, from its configuration and the shapes of state and global batch.

    `batch` has the network's inputs and labels, as the map ops return them. Frozen parameters are
    treated as trained, microbatches as one batch.
    """

    def loss(params: Any, batch: Any) -> jax.Array:
        inputs, labels = batch
        count = labels.shape[0]
        mask = jnp.ones(count, bool)
        collections = jax.tree.map(
            lambda leaf: jnp.zeros(leaf.shape, leaf.dtype), state.collections
        )
        variables = {"params": params, **collections}
        logits, _ = apply_network(config, variables, inputs, jax.random.key(0))
        divisor = compute_divisor(config, labels, mask, count)
        return compute_loss(config, logits, labels, mask, divisor).minimised

    state_bytes = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.opt_state))
    lowered = config.apply_lowerings(loss)
    return LossToPlan(name, lowered, state.params, batch, state_bytes, sync_batch_norm)


Role = Literal["batch", "contracted", "output", "both"]
"""Role of a dimension of an operator, by the arrays that have it and are divided if it is sharded.

* batch: operand and result; then the weight's gradient is a partial sum;
* contracted: operand and weight (of a look-up, the rows of the table); the result is a partial sum;
* output: weight and result; the operand's gradient is a partial sum;
* both: operand, weight and result, such as a batch of weights, one for each expert.
"""


@dataclass(frozen=True, slots=True)
class Extent:
    """Bytes and floating-point operations of values whose dimensions are in these groups."""

    groups: tuple[int, ...]
    nbytes: int = 0
    flops: int = 0


@dataclass(frozen=True, slots=True)
class PartialSum:
    """Reductions inside a region, whose results are partial sums if a summed group is sharded."""

    groups: tuple[int, ...]
    """Groups of the results."""
    summed: tuple[int, ...]
    """Groups that are summed over."""
    nbytes: int
    """Size of all results together."""
    count: int = 1
    """Number of results."""


@dataclass(frozen=True, slots=True)
class Region:
    """Activations that are linked by common groups. A group is an index of `sizes`."""

    sizes: tuple[int, ...]
    """Size of each group, of which the number of its pieces must be a divisor."""
    samples: int | None = None
    """The group of the batch dimension; None if none exists."""
    work: tuple[Extent, ...] = ()
    """Traffic and operations of a step, forward and backward."""
    saved: tuple[Extent, ...] = ()
    """Activations that the backward pass reads."""
    sums: tuple[PartialSum, ...] = ()
    parameters: tuple[Extent, ...] = ()
    """Biases, scales and other element-wise parameters, which are sharded like the region."""


@dataclass(frozen=True, slots=True)
class Array:
    """An operand or a result of an operator."""

    nbytes: int
    groups: tuple[int | None, ...]
    """Group of each dimension in the array's region; None if the dimension can't be sharded."""


@dataclass(frozen=True, slots=True)
class OperatorDim:
    """A dimension of an operator, and its positions in operand, weight and result, if any."""

    size: int
    role: Role
    operand: int | None = None
    weight: int | None = None
    result: int | None = None


@dataclass(frozen=True, slots=True)
class Operator:
    """A product with a parameter, or a look-up of the parameter's rows."""

    kind: Literal["product", "look_up"]
    operand: Array
    result: Array
    dims: tuple[OperatorDim, ...]
    weight_bytes: int
    flops: int
    """Floating-point operations of the forward pass."""
    samples: int | None = None
    """Index in `dims` of the batch dimension; None if it isn't there."""
    operand_gradient: bool = True
    """Whether the backward pass computes the operand's gradient."""


@dataclass(frozen=True, slots=True)
class OperatorUse:
    """An operator, with the indices of the regions that it reads and writes, and of its weight."""

    operator: Operator
    source: int
    target: int
    weight: int


@dataclass(frozen=True, slots=True)
class Weight:
    """A parameter of one or more operators."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    uses: int = 1


@dataclass(frozen=True, slots=True)
class RegionParameter:
    """A parameter that belongs to a region, and each dimension's group in the region."""

    path: str
    shape: tuple[int, ...]
    nbytes: int
    region: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True, slots=True)
class LayerOutput:
    """The output of a layer that has parameters, and each dimension's group in its region."""

    layer: str
    region: int
    groups: tuple[int | None, ...]


@dataclass(frozen=True)
class StepBlocks:
    """The blocks of a step, and the names of its arrays."""

    regions: tuple[Region, ...]
    operators: tuple[OperatorUse, ...]
    weights: tuple[Weight, ...]
    parameters: tuple[RegionParameter, ...] = ()
    outputs: tuple[LayerOutput, ...] = ()

    @property
    def parameter_bytes(self) -> int:
        return sum(parameter.nbytes for parameter in self._all_parameters)

    @property
    def largest(self) -> Weight | RegionParameter:
        """The largest parameter, of equal ones the last by path; an empty one if none exists."""
        empty = Weight("", (), 0)
        return max(self._all_parameters, key=attrgetter("nbytes", "path"), default=empty)

    @property
    def _all_parameters(self) -> tuple[Weight | RegionParameter, ...]:
        return (*self.weights, *self.parameters)
