"""The short version of `python -m tests.sweep_survival`."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.sweep_survival import survive


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
def test_study_survives_a_killed_worker(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("optuna", reason="pip install -e '.[dev]' brings Optuna")
    survival = survive(tmp_path, "journal", workers=2, kills=1, trials=2, seed=1, cache=cache)
    assert survival.is_whole, survival
    assert survival.killed == 1
