"""Operators of PyTorch by JAX: values and gradients are torch's for drawn arguments."""

from __future__ import annotations

import pytest

from pipeline.models.torch_graph.operators.known_operators import OPERATORS
from tests.models.torch_graph.operators.all_cases import CASES, NOT_COMPARED, draw_case
from tests.models.torch_graph.operators.core_table import (
    PAGE,
    REFUSED,
    list_core_operators,
    write_page,
)
from tests.models.torch_graph.operators.golden_results import SEED, hide_values, read_results
from tests.models.torch_graph.operators.operator_results import (
    assert_same,
    compute_by_jax,
    compute_by_torch,
)

SEEDS = range(4)


def table_rows() -> dict[str, str]:
    """Return the state of each operator of the page: computed or refused."""
    lines = [line.split("|") for line in PAGE.read_text().splitlines() if line.startswith("| `")]
    return {line[1].strip(" `"): line[2].strip() for line in lines}


def test_page_lists_what_is_computed() -> None:
    rows = table_rows()
    states = {n: "computed" if f"aten.{n}" in OPERATORS else "refused" for n in rows}
    assert rows == states
    assert PAGE.read_text() == write_page(set(rows))
    assert {name for name, state in rows.items() if state == "refused"} == set(REFUSED)


def test_core_operators_are_computed() -> None:
    rows = table_rows()
    assert list(rows.values()).count("computed") >= 0.95 * len(rows)


def test_every_operator_is_compared() -> None:
    names = {name for name in OPERATORS if not name.startswith("sym.")}
    assert names - set(NOT_COMPARED) == {f"aten.{name}" for name in CASES}
    assert set(NOT_COMPARED) <= names
    assert set(read_results()) == set(CASES)


def test_experts_of_transformers_are_grouped_products() -> None:
    names = ("transformers.grouped_mm_fallback.default", "aten._grouped_mm.default")
    theirs, ours = (OPERATORS[name].function for name in names)
    assert theirs is ours


@pytest.mark.slow
def test_page_lists_the_core_operators_of_torch() -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    assert set(table_rows()) == list_core_operators()


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_operator_matches_golden_values(name: str) -> None:
    """The golden values are torch's, of tests/golden/make_torch_operators.py."""
    case = draw_case(name, SEED)
    ours = hide_values(compute_by_jax(name, case, SEED), case)
    assert_same(ours, read_results()[name], case)


@pytest.mark.slow
@pytest.mark.parametrize("name", sorted(CASES))
def test_operator_matches_torch(name: str) -> None:
    pytest.importorskip("torch", reason="torch is not installed")
    for seed in SEEDS:
        case = draw_case(name, seed)
        assert_same(compute_by_jax(name, case, seed), compute_by_torch(name, case), case)
