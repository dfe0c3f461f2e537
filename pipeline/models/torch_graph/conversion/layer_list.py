"""A graph as a list of the package's layers, which compute all of its nodes.

A chain of nodes is a list. If several chains begin at a value, a node joins their results: an
addition is a residual block, a product with the value a gate, a concatenation of channels branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.models.layers import standard
from pipeline.models.layers.fields import CLASSES
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import name_scopes
from pipeline.models.torch_graph.conversion.known_layers import (
    Chain,
    Flow,
    NamedLayer,
    NodeReader,
    UnknownLayerError,
    read_node,
)
from pipeline.models.torch_graph.graph import INPUT, GraphNode, TorchGraph, ValueOf, find_references


@dataclass(frozen=True)
class LayerList:
    """A network as layers, and its arrays."""

    layers: tuple[LayerSpec, ...]
    arrays: Mapping[str, np.ndarray]
    """Arrays by path, such as `params/conv_0/kernel`."""


def list_layers(graph: TorchGraph) -> LayerList:
    """Return a graph as a list of layers; the last layer has the features of the graph's output.

    Raises UnknownLayerError for the first module that no layer computes.
    """
    shape = tuple(size or 0 for size in graph.input.shape[1:])
    if len(shape) != 3:
        raise UnknownLayerError(f"samples of shape {shape}; must be images")
    reader = _GraphReader(graph)
    end = graph.training.output.node
    named, _ = reader.read_chain(INPUT, end, Flow(shape), frozenset(reader.users))
    return LayerList(_list_specs(named), dict(_name_arrays(named, "")))


def set_class_features(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with `$classes` as the features of the last convolution or dense layer.

    Raises UnknownLayerError if that layer is inside of another layer.
    """
    for index in reversed(range(len(layers))):
        layer = layers[index]
        if isinstance(layer, standard.Conv | standard.Dense):
            last = layer.model_copy(update={"features": CLASSES})
            return (*layers[:index], last, *layers[index + 1 :])
        if isinstance(layer, standard.Residual | standard.Branches | standard.Gate):
            break
    raise UnknownLayerError("the classes must come from a convolution or a dense layer")


def _name_arrays(named: Sequence[NamedLayer], scope: str) -> Iterator[tuple[str, np.ndarray]]:
    """Yield the arrays of layers by path; `scope` is empty or ends in a slash."""
    for name, layer in zip(name_scopes(_list_specs(named)), named, strict=True):
        for path, array in layer.arrays.items():
            collection, leaf = path.split("/")
            yield f"{collection}/{scope}{name}/{leaf}", array
        for inner_scope, layers in layer.inside.items():
            path = "/".join(filter(None, (name, inner_scope)))
            yield from _name_arrays(layers, f"{scope}{path}/")


@dataclass(frozen=True)
class _GraphReader:
    """Reads the nodes of a graph as layers."""

    graph: TorchGraph

    @cached_property
    def nodes(self) -> dict[str, GraphNode]:
        """Nodes that compute tensors, not sizes, by name and in order."""
        return {n.name: n for n in self.graph.training.nodes if n.results}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Positions of the nodes in the order of computation."""
        return {name: position for position, name in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """Names of the nodes that read each value, in order."""
        users: dict[str, list[str]] = {INPUT: [], **{name: [] for name in self.nodes}}
        for name, node in self.nodes.items():
            for source in dict.fromkeys(self._list_sources(node)):
                users[source].append(name)
        return users

    def read_chain(self, start: str, end: str, flow: Flow, allowed: frozenset[str]) -> Chain:
        """Return the layers from the value `start` to `end`; only nodes of `allowed` are read."""
        layers: list[NamedLayer] = []
        while start != end:
            users = [user for user in self.users[start] if user in allowed]
            if len(users) == 1 and len(self._list_sources(self.nodes[users[0]])) == 1:
                name = users[0]
                node_layers, flow = read_node(self.graph, self.nodes[name], flow)
            else:
                name = self._find_join(users, allowed)
                node_layers, flow = self._read_join(start, name, flow, allowed)
            start = name
            layers += node_layers
        return tuple(layers), flow

    def _list_sources(self, node: GraphNode) -> list[str]:
        """Return the values that a node reads; a value that it reads twice is listed twice."""
        values = [value for value in find_references(node) if isinstance(value, ValueOf)]
        if any(value.item is not None for value in values):
            raise self._refuse(node.name, "it must read whole values")
        return [value.node for value in values if value.node == INPUT or value.node in self.nodes]

    def _find_join(self, users: Sequence[str], allowed: frozenset[str]) -> str:
        """Return the first node that is in all chains that begin at `users`."""
        if not users:
            first = min(allowed, key=self.positions.__getitem__)
            raise self._refuse(first, "it must read a value before it")
        open_ends = set(users)
        while len(open_ends) > 1:
            first = min(open_ends, key=self.positions.__getitem__)
            next_users = [user for user in self.users[first] if user in allowed]
            if not next_users:
                raise self._refuse(first, "its chains must join")
            open_ends = (open_ends - {first}) | set(next_users)
        return open_ends.pop()

    def _read_join(self, start: str, join: str, flow: Flow, allowed: frozenset[str]) -> Chain:
        node = self.nodes[join]
        ends = self._list_sources(node)
        if len(ends) < 2 or len(node.kwargs) > 0:
            raise self._refuse(join)
        bodies = [
            self.read_chain(start, end, flow, allowed & self._list_ancestors(end)) for end in ends
        ]
        output = NodeReader(self.graph, node, bodies[0][1]).output()
        if node.op == "aten.cat.default":
            return self._read_branches(node, bodies, output)
        if len(ends) != 2 or len(node.args) != 2 or (start in ends and ends[0] == ends[1]):
            raise self._refuse(join)
        shortcut, body = sorted((layers for layers, _ in bodies), key=_measure_size)
        if node.op == "aten.add.Tensor" and bodies[0][1] == bodies[1][1]:
            layer = standard.Residual(body=_list_specs(body), shortcut=_list_specs(shortcut))
            return (NamedLayer(layer, {}, {"": body, "shortcut": shortcut}),), output
        if node.op == "aten.mul.Tensor" and start in ends:
            gate = standard.Gate(body=_list_specs(body))
            return (NamedLayer(gate, {}, {"": body}),), replace(output, pooled=flow.pooled)
        raise self._refuse(join, "its chains must be a residual block, a gate or branches")

    def _read_branches(self, node: GraphNode, bodies: Sequence[Chain], output: Flow) -> Chain:
        dim = node.args[1] if len(node.args) > 1 else 0
        if dim not in (1, -len(output.shape)) or any(flow.flattened for _, flow in bodies):
            raise self._refuse(node.name, "it must join channels")
        branches = tuple(_list_specs(layers) for layers, _ in bodies)
        inside = {f"branch_{index}": layers for index, (layers, _) in enumerate(bodies)}
        return (NamedLayer(standard.Branches(branches=branches), {}, inside),), output

    def _list_ancestors(self, end: str) -> frozenset[str]:
        """Return a value, and all values from which it is computed."""
        ancestors: set[str] = set()
        pending = [end]
        while pending:
            name = pending.pop()
            if name not in ancestors:
                ancestors.add(name)
                pending += [] if name == INPUT else self._list_sources(self.nodes[name])
        return frozenset(ancestors)

    def _refuse(self, name: str, problem: str = "") -> UnknownLayerError:
        return NodeReader(self.graph, self.nodes[name], Flow(())).refuse(problem)


def _list_specs(named: Sequence[NamedLayer]) -> tuple[LayerSpec, ...]:
    return tuple(layer.layer for layer in named)


def _measure_size(named: Sequence[NamedLayer]) -> tuple[int, int]:
    """Return the numbers of layers and weights, by which the smaller chain is the shortcut."""
    return _count_layers(named), sum(array.size for _, array in _name_arrays(named, ""))


def _count_layers(named: Sequence[NamedLayer]) -> int:
    """Return the number of layers, including inner layers."""
    return sum(1 + sum(map(_count_layers, layer.inside.values())) for layer in named)
