"""The first 200 losses of the documents' networks are MindSpore's."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from tests import outcome
from tests.training.trajectory_cases import CASES, FOLDER, STEPS, recipe_of
from tests.whole_run import run

TOLERANCE = 1e-4
"""Relative. Sums in another order, 200 updates long."""


@pytest.mark.slow
@pytest.mark.parametrize("name", CASES)
def test_loss_parity_with_mindspore(
    name: str, cache: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    """M-02, M-04, L-01, L-03, D-05, S-01: sinks, compiled steps and all."""
    data = request.getfixturevalue("shared_data") if CASES[name].data else tmp_path
    recipe = recipe_of(
        name,
        data,
        f"cache.root={cache}",
        "stages=[data,build,compile,train]",
        "monitor.tensorboard=false",
    )
    golden = json.loads((FOLDER / f"{name}.json").read_text())["losses"]
    run(recipe, tmp_path)
    losses = [line["loss"] for line in outcome.metrics(tmp_path)]
    assert len(losses) == len(golden) == STEPS
    np.testing.assert_allclose(losses, golden, rtol=TOLERANCE)
