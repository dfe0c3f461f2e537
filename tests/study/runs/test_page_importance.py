"""The importance of keys finds the one that decides, and says how sure it is."""

from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.study.runs.page import compute_importances
from pipeline.study.runs.recorded_run import list_differing_keys, read_runs
from tests.study.runs.made_up import make_study

pytest.importorskip("optuna", reason="optuna is not installed: the extra `sweep`")


@pytest.mark.medium
def test_deciding_key_ranks_first(tmp_path: Path) -> None:
    """Accuracy hangs on the learning rate; the width is drawn beside it."""
    make_study(tmp_path, 80, steps=2)
    runs = read_runs(tmp_path, curves=False)
    found = compute_importances(runs, list_differing_keys(runs), "accuracy")
    assert not isinstance(found, str)
    first, second = found
    assert (first.key, second.key) == ("train.optimizer.lr", "model.hidden")
    assert first.low > second.high
    assert 0 <= first.low <= first.median <= first.high <= 1


def test_importance_requires_20_runs(tmp_path: Path) -> None:
    make_study(tmp_path, 19, steps=2)
    runs = read_runs(tmp_path, curves=False)
    found = compute_importances(runs, list_differing_keys(runs), "accuracy")
    assert isinstance(found, str)
    assert "needs 20 runs" in found
    assert found.endswith("has 19")


@pytest.mark.medium
def test_importance_is_deterministic(tmp_path: Path) -> None:
    make_study(tmp_path, 30, steps=2)
    runs = read_runs(tmp_path, curves=False)
    keys = list_differing_keys(runs)
    one, other = (compute_importances(runs, keys, "accuracy") for _ in range(2))
    assert one == other
