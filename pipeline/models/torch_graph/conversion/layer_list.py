"""A graph as a list of this project's layers, which compute all of its nodes.

A chain of nodes is a list. If several chains read a value, a node joins their results: an addition
is a residual block, a product with the value itself a gate, a concatenation of channels branches.
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
    Flow,
    Layers,
    NamedLayer,
    NodeReader,
    UnknownLayerError,
    layers_of_node,
)
from pipeline.models.torch_graph.graph import INPUT, GraphNode, TorchGraph, ValueOf, references_of


@dataclass(frozen=True)
class LayerList:
    """A network as layers, and its arrays under their names here."""

    layers: tuple[LayerSpec, ...]
    arrays: Mapping[str, np.ndarray]
    """Such as `params/conv_0/kernel`."""


def layers_of(graph: TorchGraph) -> LayerList:
    """Return a graph as a list of layers; the last one has the features of the graph's output.

    Raises UnknownLayerError that names the first module that no layer computes.
    """
    shape = tuple(size or 0 for size in graph.input.shape[1:])
    if len(shape) != 3:
        raise UnknownLayerError(f"samples of shape {shape}; only images are known")
    reading = _Reading(graph)
    named, _ = reading.between(
        INPUT, graph.train.output.node, Flow(shape), frozenset(reading.users)
    )
    return LayerList(tuple(n.layer for n in named), dict(_arrays(named, "")))


def open_to_classes(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with `$classes` as the features of the last layer that has features.

    Raises UnknownLayerError if that layer is inside of another.
    """
    for at in reversed(range(len(layers))):
        layer = layers[at]
        if isinstance(layer, standard.Conv | standard.Dense):
            opened = layer.model_copy(update={"features": CLASSES})
            return (*layers[:at], opened, *layers[at + 1 :])
        if isinstance(layer, standard.Residual | standard.Branches | standard.Gate):
            break
    raise UnknownLayerError("no convolution or dense layer of its own gives the classes")


def _arrays(named: Sequence[NamedLayer], scope: str) -> Iterator[tuple[str, np.ndarray]]:
    names = name_scopes(_specs(named))
    for name, layer in zip(names, named, strict=True):
        for place, array in layer.arrays.items():
            collection, leaf = place.split("/")
            yield f"{collection}/{scope}{name}/{leaf}", array
        for inner, layers in layer.inside.items():
            yield from _arrays(layers, f"{scope}{name}/{inner}/" if inner else f"{scope}{name}/")


@dataclass(frozen=True)
class _Reading:
    """A graph whose nodes are read as layers."""

    graph: TorchGraph

    @cached_property
    def nodes(self) -> dict[str, GraphNode]:
        """Nodes that compute tensors, by name, in order; sizes of batches are left out."""
        return {n.name: n for n in self.graph.train.nodes if n.results}

    @cached_property
    def places(self) -> dict[str, int]:
        """Places of the nodes in the order of computation."""
        return {name: place for place, name in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """Nodes that read each value, in order."""
        users: dict[str, list[str]] = {INPUT: [], **{name: [] for name in self.nodes}}
        for name, node in self.nodes.items():
            for source in dict.fromkeys(self._sources(node)):
                users[source].append(name)
        return users

    def between(self, start: str, end: str, flow: Flow, allowed: frozenset[str]) -> Layers:
        """Return the layers from one value to another, of the nodes that are allowed."""
        layers: list[NamedLayer] = []
        while start != end:
            users = [user for user in self.users[start] if user in allowed]
            if len(users) == 1 and len(self._sources(self.nodes[users[0]])) == 1:
                end_of_step = users[0]
                step, flow = layers_of_node(self.graph, self.nodes[end_of_step], flow)
            else:
                end_of_step = self._join(users, allowed)
                step, flow = self._read_join(start, end_of_step, flow, allowed)
            start = end_of_step
            layers += step
        return tuple(layers), flow

    def _sources(self, node: GraphNode) -> list[str]:
        """Return the values that a node reads; a value that it reads twice comes twice."""
        values = [value for value in references_of(node) if isinstance(value, ValueOf)]
        if any(value.item is not None for value in values):
            raise self._refuse(node.name, "it reads a part of a value")
        return [value.node for value in values if value.node == INPUT or value.node in self.nodes]

    def _join(self, users: Sequence[str], allowed: frozenset[str]) -> str:
        """Return the first node that all chains from some nodes on lead through."""
        if not users:
            first = min(allowed, key=self.places.__getitem__)
            raise self._refuse(first, "it reads nothing that comes before it")
        open_ends = set(users)
        while len(open_ends) > 1:
            first = min(open_ends, key=self.places.__getitem__)
            onward = [user for user in self.users[first] if user in allowed]
            if not onward:
                raise self._refuse(first, "its ways do not meet")
            open_ends = (open_ends - {first}) | set(onward)
        return open_ends.pop()

    def _read_join(self, start: str, join: str, flow: Flow, allowed: frozenset[str]) -> Layers:
        node = self.nodes[join]
        ways = self._sources(node)
        if len(ways) < 2 or len(node.kwargs) > 0:
            raise self._refuse(join)
        bodies = [self.between(start, way, flow, allowed & self._ancestors(way)) for way in ways]
        after = NodeReader(self.graph, node, bodies[0][1]).after()
        if node.op == "aten.cat.default":
            return self._branches(node, bodies, after)
        if len(ways) != 2 or len(node.args) != 2 or (start in ways and ways[0] == ways[1]):
            raise self._refuse(join)
        shortcut, body = sorted((layers for layers, _ in bodies), key=_extent)
        if node.op == "aten.add.Tensor" and bodies[0][1] == bodies[1][1]:
            layer = standard.Residual(body=_specs(body), shortcut=_specs(shortcut))
            return (NamedLayer(layer, {}, {"": body, "shortcut": shortcut}),), after
        if node.op == "aten.mul.Tensor" and start in ways:
            gate = standard.Gate(body=_specs(body))
            return (NamedLayer(gate, {}, {"": body}),), replace(after, pooled=flow.pooled)
        raise self._refuse(join, "its ways are no residual block, gate or branches")

    def _branches(self, node: GraphNode, bodies: Sequence[Layers], after: Flow) -> Layers:
        dim = node.args[1] if len(node.args) > 1 else 0
        if dim not in (1, -len(after.shape)) or any(flow.flattened for _, flow in bodies):
            raise self._refuse(node.name, "it does not join channels")
        branches = tuple(_specs(layers) for layers, _ in bodies)
        inside = {f"branch_{index}": layers for index, (layers, _) in enumerate(bodies)}
        return (NamedLayer(standard.Branches(branches=branches), {}, inside),), after

    def _ancestors(self, end: str) -> frozenset[str]:
        """Return a value, and all values that it is computed from."""
        ancestors: set[str] = set()
        pending = [end]
        while pending:
            name = pending.pop()
            if name not in ancestors:
                ancestors.add(name)
                pending += [] if name == INPUT else self._sources(self.nodes[name])
        return frozenset(ancestors)

    def _refuse(self, name: str, why: str = "") -> UnknownLayerError:
        return NodeReader(self.graph, self.nodes[name], Flow(())).refuse(why)


def _specs(named: Sequence[NamedLayer]) -> tuple[LayerSpec, ...]:
    return tuple(layer.layer for layer in named)


def _extent(named: Sequence[NamedLayer]) -> tuple[int, int]:
    """Return the numbers of layers and of weights; the smaller of two chains is the shortcut."""
    return _depth(named), sum(array.size for _, array in _arrays(named, ""))


def _depth(named: Sequence[NamedLayer]) -> int:
    """Return the number of layers, with inner layers."""
    return sum(1 + sum(map(_depth, layer.inside.values())) for layer in named)
