"""Numbers of samples that lie outside of a graph's tables, such as tokens of another tokenizer.

PyTorch raises an error for such a number. A compiled program can't: it reads the last row. So
samples are read before training. The numbers are computed from the inputs by the graph's nodes:
tokens, their sum with an offset, one column of several. Unknown before training are numbers that
depend on parameters, as a learnt code does, on images, or on all samples of a batch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.core.errors import printable
from pipeline.data.columns import Split, name_sample
from pipeline.data.inputs import DOCUMENT, NetworkInput
from pipeline.models.lowerings.problem import DEFAULTS
from pipeline.models.torch_graph.computation.apply_graph import apply_form, make_input
from pipeline.models.torch_graph.conversion.program_nodes import VIEWS, parse_base_name
from pipeline.models.torch_graph.graph import (
    INPUT,
    ArrayOf,
    Form,
    GraphNode,
    TorchGraph,
    ValueOf,
    find_references,
)
from pipeline.models.torch_graph.operator_table import OperatorContext

CHUNK_BYTES = 1 << 22
"""Bytes of samples that are read at once."""
TABLES_AND_NUMBERS: Mapping[str, tuple[int, int]] = {
    "aten._embedding_bag.default": (0, 1),
    "aten._embedding_bag_forward_only.default": (0, 1),
    "aten.embedding.default": (0, 1),
    "aten.embedding_bag.padding_idx": (0, 1),
    "aten.index.Tensor": (0, 1),
    "aten.index_select.default": (0, 2),
}
"""Positions of the table and of the numbers among the arguments of operators that read rows."""


@dataclass(frozen=True)
class TableLookup:
    """A node that reads rows of a table at numbers that depend on the inputs alone."""

    node: GraphNode
    table: str
    """Name of the table, such as `embed.weight`."""
    num_rows: int
    lowest: int
    """Least number of a row: 0, or `-num_rows` if negative numbers count from the end."""
    form: Form
    """The nodes that compute the numbers, which are the output."""
    inputs: frozenset[int]
    """Indices of the inputs that the numbers depend on."""
    batch_axis: int
    """Axis of the numbers that the samples are along."""

    @property
    def is_direct(self) -> bool:
        """Whether the numbers are an input's, or a part of them."""
        names = {parse_base_name(node.op) for node in self.form.nodes}
        return names <= VIEWS | {"_to_copy", "clone"}

    def describe_table(self) -> str:
        """Return the table's name, place and size as text for messages."""
        return f"table {self.table} of {self.node.describe_place()} has {self.num_rows:,} rows"


def list_lookups(graph: TorchGraph) -> tuple[TableLookup, ...]:
    """Return the lookups of the graph in evaluation, of equal ones the first."""
    trained = {spec.name for spec in graph.arrays if spec.role == "parameter"}
    lookups: dict[tuple[str, ValueOf], TableLookup] = {}
    for node in graph.evaluation.nodes:
        if node.op not in TABLES_AND_NUMBERS:
            continue
        table, numbers = (node.args[position] for position in TABLES_AND_NUMBERS[node.op])
        is_index = node.op == "aten.index.Tensor"
        if is_index and len(numbers) == 1:
            (numbers,) = numbers
        if not (isinstance(table, ArrayOf) and isinstance(numbers, ValueOf)):
            continue
        shape = graph.values[table.name].shape
        if node.op == "aten.index_select.default" and node.args[1] % len(shape) != 0:
            continue
        form, inputs = _select_nodes(graph.evaluation, numbers)
        reads = {item.name for item in _list_references(form) if isinstance(item, ArrayOf)}
        axis = _find_batch_axis(graph, form)
        if inputs and not reads & trained and axis is not None:
            lowest = -shape[0] if is_index else 0
            lookup = TableLookup(node, table.name, shape[0], lowest, form, inputs, axis)
            lookups.setdefault((table.name, numbers), lookup)
    return tuple(lookups.values())


def _list_references(form: Form) -> list[ValueOf | ArrayOf]:
    return [form.output, *(item for node in form.nodes for item in find_references(node))]


def _select_nodes(form: Form, output: ValueOf) -> tuple[Form, frozenset[int]]:
    """Return the nodes that a value depends on, and the indices of the inputs among them."""
    names = {output.node}
    nodes = []
    for node in reversed(form.nodes):
        if node.name in names:
            nodes.append(node)
            names |= {item.node for item in find_references(node) if isinstance(item, ValueOf)}
    selected = Form(tuple(reversed(nodes)), output)
    references = (item for item in _list_references(selected) if isinstance(item, ValueOf))
    return selected, frozenset(item.item or 0 for item in references if item.node == INPUT)


def _find_batch_axis(graph: TorchGraph, form: Form) -> int | None:
    """Return the axis of a form's output that the samples are along, or None if none is."""
    reference = form.output
    if reference.node == INPUT:
        return 0
    (node,) = (node for node in form.nodes if node.name == reference.node)
    shape = node.results[reference.item or 0].shape
    batch = graph.input.shape[0]
    if batch in shape:
        return shape.index(batch)
    # Samples of a fixed batch may be joined in one axis.
    multiples = (axis for axis, size in enumerate(shape) if batch and size and size % batch == 0)
    return next(multiples, None)


def require_rows(
    graph: TorchGraph, inputs: Sequence[NetworkInput], split: Split, vocabulary: int | None
) -> None:
    """Raise ValueError, with sample, number and table, for a number of a split without a row.

    `inputs` are in the order of the graph's, and columns of the split. Of texts, tokens that a
    split doesn't have need a row, too: `vocabulary` is their number.
    """
    for lookup in list_lookups(graph):
        arrays = {index: inputs[index] for index in lookup.inputs}
        if all(len(x.spec.shape) < 2 and x.column in split.columns for x in arrays.values()):
            _require_rows_of(graph, lookup, arrays, split)
        reads_tokens = all(x.column != DOCUMENT and x.dtype != "bool" for x in arrays.values())
        if vocabulary is None or not (reads_tokens and lookup.is_direct):
            continue
        if lookup.num_rows < vocabulary:
            raise ValueError(
                f"{lookup.describe_table()}, and the texts have {vocabulary:,} tokens; must be at "
                "least as many"
            )


def _require_rows_of(
    graph: TorchGraph, lookup: TableLookup, arrays: Mapping[int, NetworkInput], split: Split
) -> None:
    chunk = _choose_chunk(graph, arrays, split)
    compute = _make_computation(graph, lookup)
    for start in range(0, len(split), chunk):
        # The last chunk has as many samples as the others: one program computes all.
        rows = np.minimum(np.arange(start, start + chunk), len(split) - 1)
        numbers = np.asarray(compute({index: _read(x, split, rows) for index, x in arrays.items()}))
        by_sample = np.moveaxis(numbers, lookup.batch_axis, 0).reshape(chunk, -1)
        is_outside = (by_sample < lookup.lowest) | (by_sample >= lookup.num_rows)
        if is_outside.any():
            sample, position = np.argwhere(is_outside)[0]
            place = _name_place(split, arrays, int(rows[sample]))
            number = int(by_sample[sample, position])
            kind = "token" if lookup.is_direct else "number"
            raise ValueError(
                f"{lookup.describe_table()}, and {place} has the {kind} {number:,}; must be from "
                f"{lookup.lowest:,} to {lookup.num_rows - 1:,}"
            )


def _read(array: NetworkInput, split: Split, rows: np.ndarray) -> np.ndarray:
    """Return samples of a split as the network reads them, padded or cut to the network's size."""
    values = split.columns[array.column][rows]
    for length in array.spec.shape:
        padding = max(0, length - values.shape[1])
        values = np.pad(values, ((0, 0), (0, padding)))[:, :length]
    converted: np.ndarray = array.convert(np, values)
    return converted


def _choose_chunk(graph: TorchGraph, arrays: Mapping[int, NetworkInput], split: Split) -> int:
    """Return how many samples are read at once."""
    sizes = [spec.shape[0] for spec in graph.inputs.values()]
    if fixed := next((size for size in sizes if size is not None), None):
        return fixed
    sample_bytes = sum(4 * int(np.prod(x.spec.shape)) for x in arrays.values())
    return max(1, min(len(split), CHUNK_BYTES // max(1, sample_bytes)))


def _make_computation(
    graph: TorchGraph, lookup: TableLookup
) -> Callable[[Mapping[int, np.ndarray]], Any]:
    """Return a compiled function from samples, by their input's index, to the numbers."""
    form = lookup.form
    used = {item.name for item in _list_references(form) if isinstance(item, ArrayOf)}
    specs = list(graph.inputs.values())
    part = replace(graph, arrays=tuple(spec for spec in graph.arrays if spec.name in used))
    context = OperatorContext("float32", DEFAULTS, "nhwc", None)

    @jax.jit
    def compute(samples: Mapping[int, Any]) -> Any:
        inputs: list[Any] = [None] * len(specs)
        for index, values in samples.items():
            inputs[index] = make_input(specs[index], values, "nhwc")
        arrays = {name: jnp.asarray(part.values[name]) for name in used}
        return apply_form(part, form, inputs, arrays, context)[0]

    return compute


def _name_place(split: Split, arrays: Mapping[int, NetworkInput], row: int) -> str:
    if split.locate is not None:
        return printable(split.locate(int(split.list_rows()[row])))
    column = split.columns[next(iter(arrays.values())).column]
    return printable(name_sample(column, row))
