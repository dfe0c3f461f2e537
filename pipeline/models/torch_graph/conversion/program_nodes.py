"""Nodes of the programs of torch.export: operators' names, places in code, regions of modes.

A region sets a mode, such as `torch.no_grad`.
"""

from __future__ import annotations

import operator
import re
import sys
from pathlib import Path
from typing import Any

from pipeline.models.torch_graph.graph import describe_place

# fmt: off
VIEWS = frozenset((
    "_conj", "_reshape_alias", "adjoint", "alias", "as_strided", "broadcast_to", "chunk", "conj",
    "contiguous", "detach", "diagonal", "expand", "expand_as", "flatten", "getitem", "imag", "mH",
    "mT", "moveaxis", "movedim", "narrow", "numpy_T", "permute", "positive", "ravel", "real",
    "reshape", "reshape_as", "resolve_conj", "resolve_neg", "select", "slice", "split",
    "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "tensor_split", "to", "transpose",
    "type_as", "unbind", "unflatten", "unfold", "unsqueeze", "view", "view_as", "view_as_complex",
    "view_as_real",
))
# fmt: on
"""Operators whose result may share the memory of their first argument."""
_REGIONS = {"wrap_with_autocast": 4, "wrap_with_set_grad_enabled": 1}
"""Index of the region among the arguments of each operator that calls one. Settings come before it,
and what the region reads after it."""
_GRAPH_FOLDER = Path(__file__).parents[1]


def parse_base_name(full_op: str) -> str:
    """Return `add_` for `aten.add_.Tensor`."""
    return full_op.split(".")[1] if full_op.count(".") else full_op


def is_idle_dropout(node: Any) -> bool:
    """Return whether a node is a dropout of no values, which returns its argument."""
    return str(node.target) == "aten.dropout.default" and (not node.args[2] or node.args[1] == 0)


def find_owner(node: Any, name: str) -> Any:
    """Return the argument whose memory the result of a call of an operator has; None if none.

    Torch's examples of values show it, except of an idle dropout, which torch.export copies, and of
    views that are copies for the example's steps alone.
    """
    if node.args and hasattr(node.args[0], "name") and (name in VIEWS or is_idle_dropout(node)):
        return node.args[0]
    memories = _find_memories(node)
    shared = (x for x in node.all_input_nodes if memories & _find_memories(x))
    return next(shared, None)


def _find_memories(node: Any) -> set[int]:
    """Return the addresses of the storages of a node's example values."""
    value = node.meta.get("val")
    values = value if isinstance(value, tuple | list) else (value,)
    return {x.untyped_storage()._cdata for x in values if hasattr(x, "untyped_storage")}


def replace_idle_dropouts(torch: Any, module: Any) -> None:
    """Replace dropouts that drop nothing by views, which they are; torch.export makes copies."""
    for node in module.graph.nodes:
        if is_idle_dropout(node):
            node.target, node.args, node.kwargs = torch.ops.aten.alias.default, node.args[:1], {}
    module.recompile()


def list_hidden_views(torch: Any, module: Any) -> dict[Any, Any]:
    """Return torch's decompositions of operators whose results may be views against their schema,
    as of a sum of products of one tensor. Otherwise torch would take them for copies."""
    hidden = {
        node.target
        for node in module.graph.nodes
        if (name := parse_base_name(str(node.target))) not in VIEWS
        and not name.endswith("_")
        and find_owner(node, name) is not None
    }
    table = torch.export.default_decompositions()
    return {op: table[op] for op in hidden if op in table}


def find_module(node: Any) -> tuple[str, str]:
    """Return the path and the class of the module that calls a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, module_class = stack[-1]
    class_name = module_class if isinstance(module_class, str) else module_class.__name__
    return re.sub(r"@\d+", "", path), class_name.rpartition(".")[2]


def is_users_file(file: str) -> bool:
    """Return whether a file is neither torch's nor one of this package's graphs."""
    folders = (Path(sys.modules["torch"].__path__[0]), _GRAPH_FOLDER)
    return not any(Path(file).is_relative_to(folder) for folder in folders)


def find_line(node: Any) -> str:
    """Return the last line of the user's code in a node's stack; "" if none exists."""
    stack = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', stack)
    lines = [
        f"{Path(file).name}:{number}: {code.strip()}"
        for file, number, code in frames
        if is_users_file(file)
    ]
    return lines[-1] if lines else ""


def describe_node(node: Any) -> str:
    return describe_place(find_module(node)[0], find_line(node))


def inline_regions(torch: Any, module: Any, activations: frozenset[Any] = frozenset()) -> None:
    """Replace regions of a program that set a mode by their nodes.

    The recipe determines the dtypes of `torch.autocast`. Results of a region without gradients,
    under `torch.no_grad`, are detached. Raises ValueError if an activation changes in place there.
    `activations` are inputs of the module that the program computes.
    """
    graph = module.graph
    for node in list(graph.nodes):
        kind = getattr(node.target, "__name__", "")
        if kind not in _REGIONS:
            continue
        first = _REGIONS[kind]
        has_gradients = kind == "wrap_with_autocast" or node.args[0]
        region = getattr(module, node.args[first].target)
        inputs = [inner for inner in region.graph.nodes if inner.op == "placeholder"]
        outer = dict(zip(inputs, node.args[first + 1 :], strict=True))
        computed = frozenset(
            inner for inner, x in outer.items() if x.op == "call_function" or x in activations
        )
        inline_regions(torch, region, computed)
        if not has_gradients:
            _refuse_changes(region, computed)
        with graph.inserting_before(node):
            results = graph.graph_copy(region.graph, dict(outer))
            if not has_gradients:
                results = [_detach(torch, graph, result) for result in results]
        for user in list(node.users):
            user.replace_all_uses_with(results[user.args[1]])
            graph.erase_node(user)
        graph.erase_node(node)


def _refuse_changes(region: Any, activations: frozenset[Any]) -> None:
    """Raise ValueError if an activation changes in place in a region without gradients.

    Torch changes the value, but not the gradient.
    """
    for node in region.graph.nodes:
        name = parse_base_name(str(node.target))
        is_call = node.op == "call_function" and str(node.target).startswith("aten.")
        if not is_call or not name.endswith("_") or name.startswith("__"):
            continue
        if _find_memory(node.args[0]) in activations:
            raise ValueError(
                f"a tensor changes in place under torch.no_grad in {describe_node(node)}, which "
                "isn't supported; compute a new tensor"
            )


def _find_memory(node: Any) -> Any:
    """Return the node in a region whose memory the result of a view or in-place call shares."""
    while node.op == "call_function":
        is_item = node.target is operator.getitem
        name = "getitem" if is_item else parse_base_name(str(node.target))
        owner = node.args[0] if name.endswith("_") else find_owner(node, name)
        if owner is None:
            break
        node = owner
    return node


def _detach(torch: Any, graph: Any, node: Any) -> Any:
    """Return a node with the value of a region's result, without its gradient."""
    if not hasattr(node, "meta") or not isinstance(node.meta.get("val"), torch.Tensor):
        return node
    detached = graph.call_function(torch.ops.aten.detach.default, (node,))
    detached.meta = dict(node.meta)
    return detached
