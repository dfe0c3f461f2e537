"""A graph as a file: strict JSON, with the arrays beside it as safetensors.

`net.torch.json` is one object:

    format     "torch graph", version 1
    origin     text, torch: version of torch
    input      [shape, dtype]; a size that depends on the batch is null. Of a network with several
               inputs, name -> [shape, dtype]
    arrays     name -> [path, role, order, shape, dtype], the fields of `ArraySpec`
    train, evaluate
      nodes    a list of [name, operator, arguments, keyword arguments, results, module, class of
               the module, line], the fields of `GraphNode`; each result is [shape, dtype]
      output   a reference
      updates  name of a buffer -> reference

Arguments are null, booleans, numbers, texts, lists, and objects of one or two keys: {"value": node}
refers to a node's result, {"value": node, "item": n} to result n of several, {"array": name} to an
array, {"type": name} is a dtype, {"float": text} is inf, -inf or nan. A node refers only to nodes
before it. `net.torch.safetensors` has the arrays by PyTorch's names, with the axes in the order
that `arrays` names. Files aren't trusted: nothing in them is executed, and everything is checked.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from dataclasses import astuple
from pathlib import Path
from typing import Any, get_args

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.name_text import show_name
from pipeline.models.torch_graph.graph import (
    INPUT,
    KERNEL_AXES,
    ArrayOf,
    ArraySpec,
    Form,
    GraphNode,
    Order,
    Role,
    TensorSpec,
    TorchGraph,
    TypeOf,
    ValueOf,
    find_references,
)
from pipeline.models.torch_graph.operator_table import FLOAT_TYPES, TYPES
from pipeline.models.torch_graph.operators.known_operators import require_computable
from pipeline.models.weights.files.named_arrays import Arrays
from pipeline.models.weights.files.weight_files import read_weights, write_weights

FORMAT = "torch graph"
VERSION = 1
SUFFIX = ".torch.json"
MAX_NODES = 100_000
MAX_INPUTS = 1_000
MAX_ELEMENTS = 2**31
"""Largest size of an axis, and of a tensor that is computed for one sample."""
_NAME = re.compile(r"[\w.@-]{1,500}")
_PATH = re.compile(r"\w[\w.@-]*(?:/\w[\w.@-]*)*")
_DTYPES = frozenset((*TYPES, *FLOAT_TYPES))


def weights_beside(path: Path) -> Path:
    """Return the file of a graph's arrays: `net.torch.safetensors` for `net.torch.json`."""
    return path.with_suffix(".safetensors")


def write_graph(path: Path, graph: TorchGraph) -> None:
    """Write a graph and its arrays. Raises OSError and RunError if they can't be written."""
    write_weights(weights_beside(path), graph.values)
    write_whole(path, graph_to_text(graph))


def read_graph(path: Path) -> TorchGraph:
    """Read a graph and its arrays. Raises ValueError, with the path, if one is bad or missing."""
    try:
        document = read_json(path)
        return graph_of_document(document, read_weights(weights_beside(path)))
    except OSError as error:
        raise ValueError(f"{path}: can't be read: {error.strerror or error}") from error
    except DataError as error:
        raise ValueError(f"{path}: has no readable weights beside it: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: isn't a graph: {error}") from error


def graph_to_text(graph: TorchGraph) -> str:
    """Return a graph as JSON, without the values of arrays; each node and array has a line."""
    head = {
        "format": FORMAT,
        "version": VERSION,
        "origin": graph.origin,
        "torch": str(graph.torch_version),
        "input": _inputs_to_json(graph.inputs),
    }
    parts = [f'"{key}": {json.dumps(value)}' for key, value in head.items()]
    rows = [f"{json.dumps(spec.name)}: {json.dumps(astuple(spec)[1:])}" for spec in graph.arrays]
    parts.append('"arrays": {\n' + ",\n".join(rows) + "\n}")
    parts.append(f'"train": {_form_to_text(graph.training)}')
    parts.append(f'"evaluate": {_form_to_text(graph.evaluation)}')
    return "{\n" + ",\n".join(parts) + "\n}\n"


def _inputs_to_json(inputs: Mapping[str, TensorSpec]) -> Any:
    rows = {name: astuple(spec) for name, spec in inputs.items()}
    return rows if len(rows) > 1 else next(iter(rows.values()))


def _form_to_text(form: Form) -> str:
    rows = [
        [
            node.name,
            node.op,
            _to_json(node.args),
            {key: _to_json(value) for key, value in node.kwargs},
            list(map(astuple, node.results)),
            node.module,
            node.module_class,
            node.line,
        ]
        for node in form.nodes
    ]
    nodes = ",\n".join(json.dumps(row, allow_nan=False) for row in rows)
    output = json.dumps(_to_json(form.output))
    updates = json.dumps({name: _to_json(value) for name, value in form.updates})
    return f'{{"nodes": [\n{nodes}\n], "output": {output}, "updates": {updates}}}'


def _to_json(value: Any) -> Any:
    match value:
        case ValueOf(node, None):
            return {"value": node}
        case ValueOf(node, item):
            return {"value": node, "item": item}
        case ArrayOf(name):
            return {"array": name}
        case TypeOf(name):
            return {"type": name}
        case tuple():
            return [_to_json(item) for item in value]
        case float() if not math.isfinite(value):
            return {"float": str(value)}
    return value


def graph_of_document(document: Any, values: Arrays) -> TorchGraph:
    """Return the graph of a JSON document; `values` are its arrays by name.

    Raises ValueError if the document isn't valid, differs from the arrays, or has an operator that
    can't be computed.
    """
    keys = ("format", "version", "origin", "torch", "input", "arrays", "train", "evaluate")
    fields = _read_object(document, "a graph", keys)
    if (fields["format"], fields["version"]) != (FORMAT, VERSION):
        raise ValueError(
            f"format {fields['format']!r} version {fields['version']!r}; must be {FORMAT!r} "
            f"{VERSION}"
        )
    rows = _read_object(fields["arrays"], "arrays")
    arrays = tuple(_read_array(name, row) for name, row in rows.items())
    _require_paths(arrays)
    _require_values(arrays, values)
    names = frozenset(spec.name for spec in arrays)
    inputs = _read_inputs(fields["input"])
    graph = TorchGraph(
        _read_text(fields["origin"]),
        _read_text(fields["torch"]),
        inputs,
        arrays,
        _read_form(fields["train"], names, len(inputs), "train"),
        _read_form(fields["evaluate"], names, len(inputs), "evaluate"),
        values,
    )
    if any(len(spec.shape) < 2 for spec in inputs.values()):
        raise ValueError("the input must have a batch and more axes")
    buffers = {spec.name for spec in arrays if spec.role == "buffer"}
    for name, _ in (*graph.training.updates, *graph.evaluation.updates):
        if name not in buffers:
            raise ValueError(f"{show_name(name)} is updated; must be a buffer")
    require_computable(graph)
    return graph


def _read_inputs(value: Any) -> dict[str, TensorSpec]:
    """Return the inputs by name."""
    if not isinstance(value, dict):
        return {INPUT: _read_tensor(value)}
    if not 2 <= len(value) <= MAX_INPUTS:
        raise ValueError(f"input names {len(value)} inputs; must be a row, or 2 to {MAX_INPUTS}")
    return {_read_text(name): _read_tensor(row) for name, row in value.items()}


def _read_array(name: str, row: Any) -> ArraySpec:
    path, role, order, shape, dtype = _read_row(row, 5, f"array {show_name(name)}")
    if not _NAME.fullmatch(name) or not _PATH.fullmatch(_read_text(path)):
        raise ValueError(f"array {show_name(name)}: name and path must be letters, digits and dots")
    if role not in get_args(Role) or order not in get_args(Order):
        raise ValueError(
            f"array {show_name(name)}: role {show_name(str(role))}, order {show_name(str(order))}"
        )
    sizes = _read_shape(shape)
    has_wrong_ndim = order in KERNEL_AXES and len(sizes) != len(KERNEL_AXES[order])
    if None in sizes or has_wrong_ndim:
        raise ValueError(f"array {show_name(name)}: shape {shape} of order {order}")
    if _read_dtype(dtype) != "float32" and role != "constant":
        raise ValueError(f"array {show_name(name)}: dtype {show_name(str(dtype))} of a {role}")
    return ArraySpec(name, path, role, order, tuple(size or 0 for size in sizes), dtype)


def _require_paths(arrays: tuple[ArraySpec, ...]) -> None:
    """Raise ValueError if two arrays share a path, or the path of an array begins another's."""
    paths = {spec.path for spec in arrays}
    if len(paths) < len(arrays):
        raise ValueError("two arrays have the same path")
    for path in paths:
        parts = path.split("/")
        if any("/".join(parts[:count]) in paths for count in range(1, len(parts))):
            raise ValueError(f"the path of array {show_name(path)} is inside another array's")


def _require_values(arrays: tuple[ArraySpec, ...], values: Arrays) -> None:
    """Raise ValueError unless `values` have the names, shapes and dtypes of the specs."""
    unmatched = {spec.name for spec in arrays} ^ set(values)
    if unmatched:
        raise ValueError(f"array {show_name(min(unmatched))} must be in both graph and weights")
    for spec in arrays:
        value = values[spec.name]
        if value.shape != spec.shape or str(value.dtype) != spec.dtype:
            raise ValueError(
                f"array {show_name(spec.name)} is {value.dtype} {value.shape} in the weights and "
                f"{spec.dtype} {spec.shape} in the graph"
            )


def _read_form(document: Any, array_names: frozenset[str], num_inputs: int, key: str) -> Form:
    fields = _read_object(document, key, ("nodes", "output", "updates"))
    rows = fields["nodes"]
    if not isinstance(rows, list) or not 1 <= len(rows) <= MAX_NODES:
        raise ValueError(f"{key}: nodes must be a list of 1 to {MAX_NODES:,}")
    nodes: list[GraphNode] = []
    num_results: dict[str, int] = {INPUT: num_inputs}
    for row in rows:
        node = _read_node(row)
        if node.name in num_results:
            raise ValueError(f"{key}: two nodes are called {show_name(node.name)}")
        for reference in find_references(node):
            _require_defined(reference, num_results, array_names, node.name)
        num_results[node.name] = len(node.results)
        nodes.append(node)
    output = _read_argument(fields["output"])
    named_updates = _read_object(fields["updates"], "updates")
    updates = {name: _read_argument(value) for name, value in named_updates.items()}
    for reference in (output, *updates.values()):
        if not isinstance(reference, ValueOf):
            raise ValueError(f"{key}: output and updates must be references to nodes")
        _require_defined(reference, num_results, array_names, "output")
    return Form(tuple(nodes), output, tuple(updates.items()))


def _require_defined(
    reference: ValueOf | ArrayOf,
    num_results: Mapping[str, int],
    array_names: frozenset[str],
    user: str,
) -> None:
    """Raise ValueError if `user` refers to a missing array or to a result that isn't before it."""
    user = show_name(user)
    if isinstance(reference, ArrayOf):
        if reference.name not in array_names:
            raise ValueError(f"{user} reads array {show_name(reference.name)}, which is missing")
    elif reference.node not in num_results:
        raise ValueError(f"{user} reads {show_name(reference.node)}, which is not before it")
    elif reference.item is not None and reference.item >= num_results[reference.node]:
        raise ValueError(f"{user} reads result {reference.item} of {show_name(reference.node)}")
    elif reference.node == INPUT and (reference.item is None) != (num_results[INPUT] == 1):
        raise ValueError(f"{user} reads input {reference.item} of {num_results[INPUT]}")


def _read_node(row: Any) -> GraphNode:
    name, op, args, kwargs, results, module, module_class, line = _read_row(row, 8, "a node")
    if not isinstance(name, str) or not _NAME.fullmatch(name):
        raise ValueError(f"a node is called {show_name(str(name))}")
    if not isinstance(args, list) or not isinstance(results, list):
        raise ValueError(f"{show_name(name)}: arguments and results must be lists")
    fields = _read_object(kwargs, show_name(name))
    named_args = tuple((key, _read_argument(value)) for key, value in fields.items())
    return GraphNode(
        name,
        _read_text(op),
        tuple(map(_read_argument, args)),
        named_args,
        tuple(map(_read_tensor, results)),
        _read_text(module),
        _read_text(module_class),
        _read_text(line),
    )


def _read_argument(value: Any) -> Any:
    match value:
        case list():
            return tuple(map(_read_argument, value))
        case {"value": node} if len(value) == 1:
            return ValueOf(_read_text(node))
        case {"value": node, "item": item} if len(value) == 2 and type(item) is int and item >= 0:
            return ValueOf(_read_text(node), item)
        case {"array": name} if len(value) == 1:
            return ArrayOf(_read_text(name))
        case {"type": dtype} if len(value) == 1:
            return TypeOf(_read_dtype(dtype))
        case {"float": "inf" | "-inf" | "nan" as text} if len(value) == 1:
            return float(text)
        case dict():
            raise ValueError(f"argument {show_name(str(value))} isn't valid")
    return value


def _read_dtype(value: Any) -> str:
    if not isinstance(value, str) or value not in _DTYPES:
        raise ValueError(f"dtype {show_name(str(value))} isn't valid")
    return str(value)


def _read_tensor(row: Any) -> TensorSpec:
    shape, dtype = _read_row(row, 2, "a tensor")
    sizes = _read_shape(shape)
    if math.prod(size or 1 for size in sizes) > MAX_ELEMENTS:
        raise ValueError(f"shape {sizes} has more than {MAX_ELEMENTS:,} values")
    return TensorSpec(sizes, _read_dtype(dtype))


def _read_shape(value: Any) -> tuple[int | None, ...]:
    if not isinstance(value, list) or len(value) > 32:
        raise ValueError(f"shape {show_name(str(value))}; must be a list of at most 32 sizes")
    for size in value:
        if size is not None and (type(size) is not int or not 0 <= size <= MAX_ELEMENTS):
            raise ValueError(f"size {show_name(str(size))}; must be a whole number or null")
    return tuple(value)


def _read_text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 2000:
        raise ValueError(f"{show_name(str(value))}: must be a text of at most 2,000 characters")
    return value


def _read_row(value: Any, length: int, subject: str) -> list[Any]:
    if not isinstance(value, list) or len(value) != length:
        raise ValueError(f"{subject} must be a list of {length}")
    return value


def _read_object(value: Any, subject: str, keys: tuple[str, ...] | None = None) -> dict[str, Any]:
    """Return an object of JSON with the keys, or with any keys for None. Raises ValueError."""
    if not isinstance(value, dict) or (keys is not None and set(value) != set(keys)):
        names = f" of {', '.join(keys)}" if keys else ""
        raise ValueError(f"{subject} must be an object{names}")
    return value
