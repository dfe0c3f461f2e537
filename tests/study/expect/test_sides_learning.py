"""Runs that learn, and runs that learn nothing although their loss falls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.study.expect.sides import judge_learning
from tests.study.expect.runs import write_run

FALLING = list(np.linspace(2.3, 0.1, 40))


@pytest.fixture(scope="module")
def digits() -> Recipe:
    return load_recipe("lenet5_digits")


@pytest.mark.medium
@pytest.mark.parametrize(
    ("losses", "metrics", "learns"),
    [
        (FALLING, {"accuracy": 0.9, "count": 359}, True),
        # Digits have about equally many samples: 0.145 of these are the most frequent one.
        (FALLING, {"accuracy": 0.15, "count": 359}, False),
        (FALLING[::-1], {"accuracy": 0.9, "count": 359}, False),
        ([2.3] * 40, {}, False),
        (FALLING, {}, True),
        (FALLING, {"r2": 0.4}, True),
        (FALLING, {"r2": -0.01}, False),
        (FALLING[:19], {"accuracy": 0.9, "count": 359}, None),
    ],
)
def test_run_learns_if_it_beats_a_constant(
    digits: Recipe,
    tmp_path: Path,
    losses: list[float],
    metrics: dict[str, float],
    learns: bool | None,
) -> None:
    run_dir = write_run(tmp_path / "run", losses, metrics)
    assert judge_learning(run_dir, digits)[0] is learns
