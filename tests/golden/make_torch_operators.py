"""Results and gradients of operators by PyTorch, for the cases that seed 0 draws.

python -m tests.golden.make_torch_operators        with torch 2.13.0 (CPU) and this project
"""

from __future__ import annotations

from tests.models.torch_graph.operators.all_cases import CASES, draw_case
from tests.models.torch_graph.operators.golden_results import (
    SEED,
    Results,
    hide_values,
    write_results,
)
from tests.models.torch_graph.operators.operator_results import compute_by_torch


def main() -> None:
    """Write `torch_operators.npz`."""
    results: dict[str, Results] = {}
    for name in sorted(CASES):
        case = draw_case(name, SEED)
        results[name] = hide_values(compute_by_torch(name, case), case)
    write_results(results)


if __name__ == "__main__":
    main()
