"""Nodes of the programs of torch.export: the names of their operators, and their places in code."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

from pipeline.models.torch_graph.graph import describe_place

# fmt: off
VIEWS = frozenset((
    "alias", "as_strided", "chunk", "contiguous", "detach", "diagonal", "expand", "expand_as",
    "flatten", "getitem", "mT", "movedim", "narrow", "numpy_T", "permute", "reshape", "reshape_as",
    "select", "slice", "split", "split_with_sizes", "squeeze", "swapaxes", "swapdims", "t", "to",
    "transpose", "type_as", "unbind", "unflatten", "unsqueeze", "view", "view_as",
))
# fmt: on
"""Operators whose result may share the memory of their first argument."""


def parse_base_name(full_op: str) -> str:
    """Return `add_` for `aten.add_.TorchTensor`."""
    return full_op.split(".")[1] if full_op.count(".") else full_op


def find_module(node: Any) -> tuple[str, str]:
    """Return the path and the class of the module that calls a node."""
    stack = list((node.meta.get("nn_module_stack") or {}).values())
    if not stack:
        return "", ""
    path, module_class = stack[-1]
    class_name = module_class if isinstance(module_class, str) else module_class.__name__
    return re.sub(r"@\d+", "", path), class_name.rpartition(".")[2]


def find_line(node: Any) -> str:
    """Return the last line of the node's stack that isn't torch's; "" if none exists."""
    stack = node.meta.get("stack_trace") or ""
    frames = re.findall(r'File "([^"]+)", line (\d+)[^\n]*\n\s*([^\n]*)', stack)
    lines = [
        f"{Path(file).name}:{number}: {code.strip()}"
        for file, number, code in frames
        if "/torch/" not in file and "/pipeline/models/torch_graph/" not in file
    ]
    return lines[-1] if lines else ""


def describe_node(node: Any) -> str:
    return describe_place(find_module(node)[0], find_line(node))
