"""Bytes of collectives as the planner prices them, against those that XLA compiles."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from tests.backends.planner.compiled import compiled_rows

NEAR = 0.05

pytestmark = pytest.mark.slow


compiled = cache(compiled_rows)


def sums(row: dict[str, Any]) -> tuple[float, float]:
    return sum(row["predicted"].values()), sum(one["nbytes"] for one in row["compiled"])


@pytest.mark.parametrize("case", ["head", "gpt", "resnet"])
def test_compiled_plans_move_the_predicted_bytes(case: str) -> None:
    rows = compiled(case)
    assert len(rows) >= 2
    for row in rows:
        predicted, measured = sums(row)
        assert predicted == pytest.approx(measured, rel=NEAR), row


def test_sharded_head_moves_far_fewer_bytes_than_data_parallel() -> None:
    best, *_, data_parallel = compiled("head")
    assert data_parallel["strategy"] == "data parallel"
    assert sums(best)[1] < sums(data_parallel)[1] / 100
    assert best["temporaries"] < data_parallel["temporaries"] / 5


def test_compiled_plans_include_meshes_of_two_axes() -> None:
    assert {"2 x 4", "4 x 2"} <= {row["mesh"] for row in compiled("gpt")}
    assert {"2 x 4", "4 x 2"} <= {row["mesh"] for row in compiled("head")}
