"""Core operators of ATen by JAX: values and gradients are torch's for drawn arguments."""

from __future__ import annotations

from typing import Any

import pytest

from pipeline.models.torch_graph.operators.known_operators import OPERATORS
from tests.models.torch_graph.operators import core_index_cases as core_index_cases
from tests.models.torch_graph.operators import core_layer_cases as core_layer_cases
from tests.models.torch_graph.operators.core_cases import CASES, draw_case
from tests.models.torch_graph.operators.operator_results import (
    assert_same,
    compute_by_jax,
    compute_by_torch,
)

torch = pytest.importorskip("torch", reason="torch is not installed")

SEEDS = range(4)
REFUSED = {
    "_local_scalar_dense.default": "a number of Python that depends on the data",
    "atan2.out": "it writes into an argument; programs have the functional form",
    "nonzero.default": "the shape depends on the data",
    "resize_.default": "it changes the memory of its argument",
    "sym_is_contiguous.default": "arrays have no order in memory",
}
"""Why a core operator isn't computed."""


def list_core_operators() -> set[str]:
    """Return the operators that torch tags as core."""
    names = {schema.name for schema in torch._C._jit_get_all_schemas()}
    packets = {name.split("::")[1] for name in names if name.startswith("aten::")}
    found: set[str] = set()
    for packet in packets:
        operators: Any = getattr(torch.ops.aten, packet, None)
        for overload in operators.overloads() if hasattr(operators, "overloads") else ():
            if torch.Tag.core in getattr(operators, overload).tags:
                found.add(f"{packet}.{overload}")
    return found


def test_every_core_operator_is_compared_or_refused() -> None:
    core = list_core_operators()
    computed = {name for name in core if f"aten.{name}" in OPERATORS}
    assert core - computed <= set(REFUSED)
    assert computed == core & set(CASES)
    assert len(computed) >= 0.95 * len(core)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_core_operator_matches_torch(name: str) -> None:
    for seed in SEEDS:
        case = draw_case(name, seed)
        assert_same(compute_by_jax(name, case, seed), compute_by_torch(name, case), case)
