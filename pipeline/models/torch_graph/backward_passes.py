"""Custom backward passes in a form: which nodes compute gradients, and of what.

A `torch.autograd.Function` is three parts of a form. Its forward pass is plain nodes. A node
`pipeline.cotangent` stands for the gradient that reaches an output, and all nodes that depend on it
are the backward pass. A node `pipeline.custom_gradient` (inputs, outputs, cotangents, gradients)
returns the outputs, and is differentiated by the backward pass alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from pipeline.models.torch_graph.graph import (
    ArrayOf,
    Form,
    GraphNode,
    ValueOf,
    find_references,
)

COTANGENT = "pipeline.cotangent.default"
CUSTOM_GRADIENT = "pipeline.custom_gradient.default"


@dataclass(frozen=True)
class BackwardPass:
    """The nodes that compute the gradients of one node `pipeline.custom_gradient`."""

    numbers: tuple[int, ...]
    """Indices of the nodes in their form, in the order of computation."""
    reads: tuple[ValueOf | ArrayOf, ...]
    """Arrays and results of the forward pass that the nodes, or the gradients, refer to."""


def find_backward_passes(form: Form) -> Mapping[str, BackwardPass]:
    """Return the backward passes of a form by their node `pipeline.custom_gradient`.

    Raises ValueError if a node outside of a backward pass depends on its results.
    """
    by_cotangent = {
        reference.node: node.name
        for node in form.nodes
        if node.op == CUSTOM_GRADIENT
        for reference in _read_list(node, 2)
        if isinstance(reference, ValueOf)
    }
    owners: dict[str, str] = {}
    numbers: dict[str, list[int]] = {name: [] for name in by_cotangent.values()}
    for number, node in enumerate(form.nodes):
        owner = _find_owner(node, owners, by_cotangent)
        if owner is not None:
            owners[node.name] = owner
            numbers[owner].append(number)
    for name, reference in (("", form.output), *form.updates):
        if reference.node in owners:
            what = f"buffer {name} changes" if name else "the network's output depends on a value"
            raise ValueError(f"{what} in a backward pass; must do so in the forward pass")
    return {
        node.name: BackwardPass(
            tuple(numbers.get(node.name, ())),
            tuple(_find_reads(form, node, numbers.get(node.name, ()), owners)),
        )
        for node in form.nodes
        if node.op == CUSTOM_GRADIENT
    }


def _find_owner(
    node: GraphNode, owners: Mapping[str, str], by_cotangent: Mapping[str, str]
) -> str | None:
    """Return the node `pipeline.custom_gradient` whose backward pass has a node; None for none."""
    if node.op == COTANGENT:
        if node.name not in by_cotangent:
            raise ValueError(f"{node.op} of {node.describe_place()} has no custom gradient")
        return by_cotangent[node.name]
    if node.op == CUSTOM_GRADIENT:
        forward = (*_read_list(node, 0), *_read_list(node, 1))
        gradients = _read_list(node, 3)
        wrong = [r for r in forward if isinstance(r, ValueOf) and r.node in owners]
        wrong += [
            r
            for r in gradients
            if isinstance(r, ValueOf) and owners.get(r.node, node.name) != node.name
        ]
        if wrong or len(gradients) != len(_read_list(node, 0)):
            raise ValueError(
                f"{node.op} of {node.describe_place()}: its gradients must be of its inputs, and "
                "depend on its cotangents alone"
            )
        return None
    found = {
        owners[reference.node]
        for reference in find_references(node)
        if isinstance(reference, ValueOf) and reference.node in owners
    }
    if len(found) > 1:
        raise ValueError(f"{node.op} of {node.describe_place()} is of two backward passes")
    return found.pop() if found else None


def _read_list(node: GraphNode, index: int) -> tuple[object, ...]:
    """Return a list among the four arguments of a custom gradient. Raises ValueError if missing."""
    value = node.args[index] if len(node.args) == 4 else None
    if not isinstance(value, tuple):
        raise ValueError(f"{node.op} of {node.describe_place()} must have four lists")
    return value


def _find_reads(
    form: Form, node: GraphNode, numbers: tuple[int, ...] | list[int], owners: Mapping[str, str]
) -> Iterator[ValueOf | ArrayOf]:
    """Yield each reference of a backward pass to what isn't part of it, once."""
    references = [r for number in numbers for r in find_references(form.nodes[number])]
    references += [r for r in _read_list(node, 3) if isinstance(r, ValueOf | ArrayOf)]
    for reference in dict.fromkeys(references):
        if isinstance(reference, ArrayOf) or owners.get(reference.node) != node.name:
            yield reference
