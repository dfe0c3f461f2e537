"""Programs of torch.export whose operators are computed, by torch's decompositions if necessary.

Torch decomposes most of its operators into a core set. That takes seconds, so a program is
rewritten only if it has an operator that the table lacks, and only such operators are.
"""

from __future__ import annotations

from typing import Any

from pipeline.models.torch_graph.conversion.functional_form import (
    Draft,
    ProgramReader,
    SharedMemoryError,
)
from pipeline.models.torch_graph.operators.known_operators import OPERATORS


def read_program(torch: Any, program: Any, output: str | None = None) -> Draft:
    """Return the form of a program, whose output has a name if the program has several.

    Raises ValueError if it has none.
    """
    try:
        draft = ProgramReader(torch, program, output).read()
    except SharedMemoryError:
        # A tensor changes in place through a view. Torch can rewrite that, but takes seconds.
        program = program.run_decompositions({})
        draft = ProgramReader(torch, program, output).read()
    if all(node.op in OPERATORS for node in draft.form.nodes):
        return draft
    program = program.run_decompositions(_list_decompositions(torch))
    return ProgramReader(torch, program, output).read()


def _list_decompositions(torch: Any) -> Any:
    """Return torch's decompositions of the operators that the table lacks."""
    table = torch.export.default_decompositions()
    for operator in list(table.keys()):
        if str(operator) in OPERATORS:
            table.pop(operator)
    return table
