"""A graph as a list of this project's layers, where each of its nodes is part of one.

A chain of nodes is a list. Where a value goes several ways, they end in a node that joins them: an
addition is a residual block, a product with the value itself a gate, a concatenation of channels
branches.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np

from pipeline.models.layers import standard
from pipeline.models.layers.fields import CLASSES
from pipeline.models.layers.model_spec import LayerSpec
from pipeline.models.layers.standard import scope_names
from pipeline.models.torch_graph.conversion.known_layers import (
    Flow,
    Known,
    KnownNode,
    NamedLayer,
    UnknownLayerError,
    layers_of_node,
)
from pipeline.models.torch_graph.graph import INPUT, GraphNode, TorchGraph, ValueOf, references_of

_ADDS, _PRODUCTS, _JOINS = ("aten.add.Tensor",), ("aten.mul.Tensor",), ("aten.cat.default",)


@dataclass(frozen=True)
class LayerList:
    """A network as layers, and its arrays under their names here."""

    layers: tuple[LayerSpec, ...]
    arrays: Mapping[str, np.ndarray]
    """Such as `params/conv_0/kernel`."""


def layers_of(graph: TorchGraph) -> LayerList:
    """Return a graph as a list of layers; the last one gives as many features as the graph.

    Raises UnknownLayerError that names the first module that is no known layer.
    """
    shape = tuple(size or 0 for size in graph.input.shape[1:])
    if len(shape) != 3:
        raise UnknownLayerError(f"samples of shape {shape}; only images are known")
    reading = _Reading(graph)
    named, _ = reading.between(
        INPUT, graph.train.output.node, Flow(shape), frozenset(reading.users)
    )
    return LayerList(tuple(each.layer for each in named), dict(_arrays(named, "")))


def open_to_classes(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with `$classes` as the features of the last layer that has some.

    Raises UnknownLayerError where that is inside of another layer.
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
    names = scope_names([each.layer for each in named])
    for name, each in zip(names, named, strict=True):
        for place, array in each.arrays.items():
            collection, leaf = place.split("/")
            yield f"{collection}/{scope}{name}/{leaf}", array
        for inner, layers in each.inside.items():
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
    def place(self) -> dict[str, int]:
        """Place of each node in the order of computation."""
        return {name: place for place, name in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """Nodes that read each value, in order."""
        found: dict[str, list[str]] = {INPUT: [], **{name: [] for name in self.nodes}}
        for name, node in self.nodes.items():
            for source in dict.fromkeys(self._sources(node)):
                found[source].append(name)
        return found

    def between(self, start: str, end: str, flow: Flow, allowed: frozenset[str]) -> Known:
        """Return the layers from one value to another, of the nodes that are allowed."""
        layers: list[NamedLayer] = []
        while start != end:
            users = [user for user in self.users[start] if user in allowed]
            if len(users) == 1 and len(self._sources(self.nodes[users[0]])) == 1:
                found, flow = layers_of_node(self.graph, self.nodes[users[0]], flow)
                start = users[0]
            else:
                join = self._join(users, allowed)
                found, flow = self._joined(start, join, flow, allowed)
                start = join
            layers += found
        return tuple(layers), flow

    def _sources(self, node: GraphNode) -> list[str]:
        """Return the values that a node reads, once for each time."""
        values = [each for each in references_of(node) if isinstance(each, ValueOf)]
        for value in values:
            if value.item is not None:
                raise KnownNode(self.graph, node, Flow(())).unknown("it reads a part of a value")
        return [value.node for value in values if value.node == INPUT or value.node in self.nodes]

    def _join(self, users: Sequence[str], allowed: frozenset[str]) -> str:
        """Return the first node that all ways from some nodes on lead through."""
        if not users:
            first = min(allowed, key=self.place.__getitem__)
            raise self._unknown(first, "it reads nothing that comes before it")
        open_ends = set(users)
        while len(open_ends) > 1:
            first = min(open_ends, key=self.place.__getitem__)
            onward = [user for user in self.users[first] if user in allowed]
            if not onward:
                raise self._unknown(first, "its ways do not meet")
            open_ends = (open_ends - {first}) | set(onward)
        return open_ends.pop()

    def _joined(self, start: str, join: str, flow: Flow, allowed: frozenset[str]) -> Known:
        node = self.nodes[join]
        ways = self._sources(node)
        if len(ways) < 2 or len(node.kwargs) > 0:
            raise self._unknown(join)
        known = [self.between(start, way, flow, allowed & self._leading_to(way)) for way in ways]
        after = KnownNode(self.graph, node, known[0][1]).after()
        if node.op in _JOINS:
            return self._branches(node, known, after)
        if len(ways) != 2 or len(node.args) != 2 or (start in ways and ways[0] == ways[1]):
            raise self._unknown(join)
        bodies = sorted((layers for layers, _ in known), key=_extent)
        if node.op in _ADDS and known[0][1] == known[1][1]:
            layer = standard.Residual(body=_specs(bodies[1]), shortcut=_specs(bodies[0]))
            inside = {"": bodies[1], "shortcut": bodies[0]}
            return (NamedLayer(layer, {}, inside),), after
        if node.op in _PRODUCTS and start in ways:
            gate = standard.Gate(body=_specs(bodies[1]))
            return (NamedLayer(gate, {}, {"": bodies[1]}),), replace(after, pooled=flow.pooled)
        raise self._unknown(join, "its ways are no residual block, gate or branches")

    def _branches(self, node: GraphNode, known: Sequence[Known], after: Flow) -> Known:
        flows = [flow for _, flow in known]
        dim = node.args[1] if len(node.args) > 1 else 0
        if dim not in (1, 1 - 1 - len(after.shape)) or any(flow.flattened for flow in flows):
            raise self._unknown(node.name, "it does not join channels")
        branches = tuple(_specs(layers) for layers, _ in known)
        inside = {f"branch_{index}": layers for index, (layers, _) in enumerate(known)}
        return (NamedLayer(standard.Branches(branches=branches), {}, inside),), after

    def _leading_to(self, end: str) -> frozenset[str]:
        """Return a value, and all that it is computed from."""
        found, waiting = {end}, [end]
        while waiting:
            name = waiting.pop()
            if name == INPUT:
                continue
            for source in self._sources(self.nodes[name]):
                if source not in found:
                    found.add(source)
                    waiting.append(source)
        return frozenset(found)

    def _unknown(self, name: str, why: str = "") -> UnknownLayerError:
        return KnownNode(self.graph, self.nodes[name], Flow(())).unknown(why)


def _specs(named: Sequence[NamedLayer]) -> tuple[LayerSpec, ...]:
    return tuple(each.layer for each in named)


def _extent(named: Sequence[NamedLayer]) -> tuple[int, int]:
    """Return the number of layers and that of weights: of two ways the smaller is the shortcut."""
    return _depth(named), sum(array.size for _, array in _arrays(named, ""))


def _depth(named: Sequence[NamedLayer]) -> int:
    """Return the number of layers, those inside of others among them."""
    return sum(1 + sum(map(_depth, each.inside.values())) for each in named)
