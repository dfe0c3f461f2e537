"""The table of core operators in docs/core-operators.md.

python -m tests.models.torch_graph.operators.core_table     writes it, with torch
"""

from __future__ import annotations

from collections.abc import Collection
from pathlib import Path
from typing import Any

from pipeline.models.torch_graph.operators.known_operators import OPERATORS

PAGE = Path(__file__).parents[4] / "docs" / "core-operators.md"
REFUSED = {
    "_local_scalar_dense.default": "a number of Python that depends on the data",
    "atan2.out": "writes into an argument; torch.export replaces it by `atan2.default`",
    "nonzero.default": "a shape that depends on the data",
    "resize_.default": "changes the memory of its argument",
    "sym_is_contiguous.default": "arrays have no order in memory",
}
"""Why a core operator isn't computed."""


def list_core_operators() -> set[str]:
    """Return the operators that torch tags as core."""
    import torch

    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    packets = {name.split("::")[1] for name in names if name.startswith("aten::")}
    found: set[str] = set()
    for packet in packets:
        operators: Any = getattr(torch.ops.aten, packet, None)
        for overload in operators.overloads() if hasattr(operators, "overloads") else ():
            if torch.Tag.core in getattr(operators, overload).tags:
                found.add(f"{packet}.{overload}")
    return found


def write_page(core: Collection[str]) -> str:
    """Return the page about a set of core operators."""
    computed = {name for name in core if f"aten.{name}" in OPERATORS}
    lines = [
        "# Core operators of PyTorch",
        "",
        f"`model=torch` computes {len(computed)} of the {len(core)} operators that torch tags as",
        f"core, and {len(OPERATORS) - len(computed)} others. Each is compared with torch for drawn",
        "arguments: in value, and in gradient unless torch lacks one or ignores an argument;",
        "random results in shape and dtype. Torch decomposes others into core ones.",
        "",
        "| operator | | why |",
        "| --- | --- | --- |",
    ]
    for name in sorted(core):
        state = "computed" if name in computed else "refused"
        lines.append(f"| `{name}` | {state} | {REFUSED.get(name, '')} |")
    return "\n".join(lines) + "\n"


if __name__ == "__main__":
    PAGE.write_text(write_page(list_core_operators()))
