"""The choice of the logits among a module's outputs, and the translation of a whole graph to a list
of the package's layers."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields, is_dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.models.layers import standard
from pipeline.models.layers.model_spec import CLASSES, LayerSpec
from pipeline.models.modules.apply_layers import name_scopes
from pipeline.models.torch_graph.conversion.known_layers import (
    Chain,
    Flow,
    NamedLayer,
    NodeReader,
    UnknownLayerError,
    read_node,
)
from pipeline.models.torch_graph.graph import INPUT, GraphNode, TorchGraph, ValueOf, find_references

LOGITS = "logits"
"""Name of the output that is chosen by default among several."""
_PLAIN = (type(None), bool, int, float, complex, str, bytes)
"""Types of values in a result that torch.export knows and leaves out."""
MAX_NAMED = 8
"""Most outputs that a message names."""


def name_outputs(spec: Any) -> list[str]:
    """Return the names of the leaves of a result, by its `TreeSpec` of torch.

    Keys of a dictionary, fields of a named tuple, and positions are joined by dots:
    `past_key_values.0`. An only tensor has the name "".
    """
    if spec.is_leaf():
        return [""]
    children = spec.children()
    return [
        ".".join(filter(None, (key, inner)))
        for key, child in zip(_name_children(spec.context, len(children)), children, strict=True)
        for inner in name_outputs(child)
    ]


def _name_children(context: Any, count: int) -> list[str]:
    """Return the names of a container's items; their positions if the context has no names."""
    names = getattr(context, "_fields", context)
    if isinstance(names, Sequence) and not isinstance(names, str) and len(names) == count:
        return list(map(str, names))
    return list(map(str, range(count)))


def make_plain(torch: Any, result: Any, output: str | None = None) -> Any:
    """Return the result of a module with dictionaries in place of dataclasses and of mappings, such
    as the ModelOutput of transformers.

    A field that is None is left out, and so is another object, such as a decoder's cache, beside
    the field of the logits, which `output` or their usual name says. Raises ValueError for another
    object elsewhere, whose tensors torch.export doesn't find.
    """
    plain = _replace_records(result)
    if isinstance(plain, dict):
        usable = {name: x for name, x in plain.items() if _find_unknown(torch, x) is None}
        if (output or LOGITS).partition(".")[0] in usable:
            return usable
    unknown = _find_unknown(torch, plain)
    if unknown is not None:
        kind = f"{type(unknown).__module__}.{type(unknown).__qualname__}"
        raise ValueError(
            f"the network returns a {kind}; must return a tensor, or a tuple, list, dictionary or "
            "dataclass of tensors, or name the logits by model.output"
        )
    return plain


def _find_unknown(torch: Any, result: Any) -> Any:
    """Return the first object in a result that is unknown to torch.export; None without any."""
    known = (torch.Tensor, torch.SymInt, torch.SymFloat, *_PLAIN)
    leaves = torch.utils._pytree.tree_leaves(result)
    return next((leaf for leaf in leaves if not isinstance(leaf, known)), None)


def _replace_records(result: Any) -> Any:
    if is_dataclass(result) and not isinstance(result, type):
        result = {field.name: getattr(result, field.name) for field in fields(result)}
        result = {name: value for name, value in result.items() if value is not None}
    if isinstance(result, Mapping):
        return {name: _replace_records(value) for name, value in result.items()}
    # A tuple with names is one of torch's kinds of containers.
    if type(result) in (tuple, list):
        return type(result)(map(_replace_records, result))
    return result


def choose_tensor(torch: Any, result: Any) -> Any:
    """Return the logits in the result of a module. Raises ValueError unless they are known."""
    leaves, spec = torch.utils._pytree.tree_flatten(make_plain(torch, result))
    named = zip(name_outputs(spec), leaves, strict=True)
    return choose_output({n: x for n, x in named if isinstance(x, torch.Tensor)}, None)


def choose_output(outputs: Mapping[str, Any], name: str | None) -> Any:
    """Return the output of a name, or the logits if that is None.

    `outputs` are tensors by name. An only tensor that has no name is returned whatever the name.
    Raises ValueError unless such an output exists.
    """
    if set(outputs) == {""}:
        return outputs[""]
    chosen = LOGITS if name is None and LOGITS in outputs else name
    if chosen is None and len(outputs) == 1:
        return next(iter(outputs.values()))
    if chosen is not None and chosen in outputs:
        return outputs[chosen]
    names = ", ".join(list(outputs)[:MAX_NAMED])
    if len(outputs) > MAX_NAMED:
        names += f" and {len(outputs) - MAX_NAMED} more"
    if not outputs:
        raise ValueError("the network returns no tensor; must return one, the logits")
    if chosen is None:
        raise ValueError(
            f"the network returns {len(outputs)} tensors, {names}; model.output must name one of "
            "them, the logits"
        )
    raise ValueError(
        f"the network returns no output {chosen}; model.output must name one of {names}"
    )


@dataclass(frozen=True)
class LayerList:
    """A network's layers and arrays."""

    layers: tuple[LayerSpec, ...]
    arrays: Mapping[str, np.ndarray]
    """Arrays by path, such as `params/conv_0/kernel`."""


def list_layers(graph: TorchGraph) -> LayerList:
    """Return the layers that compute a graph in training, with its arrays.

    Raises UnknownLayerError for the first node that no layer computes.
    """
    shape = tuple(size or 0 for size in graph.input.shape[1:])
    if len(shape) != 3:
        raise UnknownLayerError(f"samples of shape {shape}; must be images")
    reader = _GraphReader(graph)
    end = graph.training.output.node
    layers, _ = reader.read_chain(INPUT, end, Flow(shape), frozenset(reader.users))
    return LayerList(_list_specs(layers), dict(_name_arrays(layers, "")))


def set_class_features(layers: Sequence[LayerSpec]) -> tuple[LayerSpec, ...]:
    """Return the layers with `$classes` as the features of the last convolution or dense layer.

    Raises UnknownLayerError if such a layer is missing, or is inside of another layer.
    """
    for index, layer in reversed(list(enumerate(layers))):
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
    """Translates the nodes of a graph to layers."""

    graph: TorchGraph

    @cached_property
    def nodes(self) -> dict[str, GraphNode]:
        """Nodes that compute tensors, not sizes, by name, in the order of computation."""
        return {node.name: node for node in self.graph.training.nodes if node.results}

    @cached_property
    def positions(self) -> dict[str, int]:
        """Indices of the nodes in the order of computation."""
        return {name: position for position, name in enumerate(self.nodes)}

    @cached_property
    def users(self) -> dict[str, list[str]]:
        """Names of the nodes that read the input or the result of each node."""
        users: dict[str, list[str]] = {INPUT: [], **{name: [] for name in self.nodes}}
        for name, node in self.nodes.items():
            for source in dict.fromkeys(self._list_sources(node)):
                users[source].append(name)
        return users

    def read_chain(self, start: str, end: str, flow: Flow, allowed: frozenset[str]) -> Chain:
        """Return the layers that compute the value `end` from the value `start`.

        `flow` describes `start`. Nodes that aren't in `allowed` are skipped.
        """
        layers: list[NamedLayer] = []
        value = start
        while value != end:
            users = [user for user in self.users[value] if user in allowed]
            if len(users) == 1 and len(self._list_sources(self.nodes[users[0]])) == 1:
                next_value = users[0]
                node_layers, flow = read_node(self.graph, self.nodes[next_value], flow)
            else:
                next_value = self._find_join(users, allowed)
                node_layers, flow = self._read_join(value, next_value, flow, allowed)
            value = next_value
            layers += node_layers
        return tuple(layers), flow

    def _list_sources(self, node: GraphNode) -> list[str]:
        """Return the tensors that a node reads; a tensor that it reads twice is listed twice."""
        values = [value for value in find_references(node) if isinstance(value, ValueOf)]
        if any(value.item is not None for value in values):
            raise self._refuse(node.name, "it must read whole values")
        return [value.node for value in values if value.node == INPUT or value.node in self.nodes]

    def _find_join(self, users: Sequence[str], allowed: frozenset[str]) -> str:
        """Return the first node at which all chains that begin with `users` meet."""
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
        """Return the layer that computes the node `join` and the chains from `start` to it."""
        node = self.nodes[join]
        ends = self._list_sources(node)
        if len(ends) < 2 or node.kwargs:
            raise self._refuse(join)
        chains = [
            self.read_chain(start, end, flow, allowed & self._list_ancestors(end)) for end in ends
        ]
        _, first_flow = chains[0]
        output = NodeReader(self.graph, node, first_flow).output()
        if node.op == "aten.cat.default":
            return self._read_branches(node, chains, output)
        if len(ends) != 2 or len(node.args) != 2 or ends == [start, start]:
            raise self._refuse(join)
        _, second_flow = chains[1]
        shortcut, body = sorted((layers for layers, _ in chains), key=_measure_size)
        if node.op == "aten.add.Tensor" and first_flow == second_flow:
            layer = standard.Residual(body=_list_specs(body), shortcut=_list_specs(shortcut))
            return (NamedLayer(layer, {}, {"": body, "shortcut": shortcut}),), output
        if node.op == "aten.mul.Tensor" and start in ends:
            gate = standard.Gate(body=_list_specs(body))
            return (NamedLayer(gate, {}, {"": body}),), replace(output, pooled=flow.pooled)
        raise self._refuse(join, "its chains must be a residual block, a gate or branches")

    def _read_branches(self, node: GraphNode, chains: Sequence[Chain], output: Flow) -> Chain:
        dim = node.args[1] if len(node.args) > 1 else 0
        if dim not in (1, -len(output.shape)) or any(flow.flattened for _, flow in chains):
            raise self._refuse(node.name, "it must join channels")
        branches = tuple(_list_specs(layers) for layers, _ in chains)
        inside = {f"branch_{index}": layers for index, (layers, _) in enumerate(chains)}
        return (NamedLayer(standard.Branches(branches=branches), {}, inside),), output

    def _list_ancestors(self, end: str) -> frozenset[str]:
        """Return the names of a value and of all values from which it is computed."""
        ancestors: set[str] = set()
        pending = [end]
        while pending:
            name = pending.pop()
            if name not in ancestors:
                ancestors.add(name)
                if name != INPUT:
                    pending += self._list_sources(self.nodes[name])
        return frozenset(ancestors)

    def _refuse(self, name: str, problem: str = "") -> UnknownLayerError:
        return NodeReader(self.graph, self.nodes[name], Flow(())).refuse(problem)


def _list_specs(named: Sequence[NamedLayer]) -> tuple[LayerSpec, ...]:
    return tuple(layer.layer for layer in named)


def _measure_size(named: Sequence[NamedLayer]) -> tuple[int, int]:
    """Return the numbers of layers and of weights; of two chains the smaller is the shortcut."""
    return _count_layers(named), sum(array.size for _, array in _name_arrays(named, ""))


def _count_layers(named: Sequence[NamedLayer]) -> int:
    """Return the number of layers, including inner layers."""
    return sum(1 + sum(map(_count_layers, layer.inside.values())) for layer in named)
