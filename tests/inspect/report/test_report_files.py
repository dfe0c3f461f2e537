"""Figures over folds; the files of whole commands are compared in tests/cli/test_folds.py."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.inspect.report.report_files import FoldMetric, read_fold_metrics


@pytest.mark.medium
@given(st.lists(st.floats(-1e6, 1e6), min_size=2, max_size=20))
def test_mean_and_spread_match_the_statistics_module(values: list[float]) -> None:
    metric = FoldMetric("loss", tuple(values))
    assert metric.mean == pytest.approx(statistics.mean(values), rel=1e-9, abs=1e-6)
    assert metric.std == pytest.approx(statistics.stdev(values), rel=1e-6, abs=1e-6)
    assert list(metric.cells())[3:] == [f"fold_{number}" for number in range(len(values))]


def test_only_metrics_of_all_folds_are_averaged(tmp_path: Path) -> None:
    """Per-class values count as their average; a diverged fold has no finite loss."""
    metrics = [
        {"accuracy": 0.5, "count": 10, "loss": 1.0, "f1": {"macro": 0.25, "per_class": [0.5, 0]}},
        {"accuracy": 0.7, "count": 9, "loss": None, "f1": {"macro": 0.75, "per_class": [1, 0.5]}},
    ]
    for number, values in enumerate(metrics):
        job = tmp_path / str(number)
        job.mkdir()
        (job / "overrides.yaml").write_text(f"dataset.folds.index: {number}\n")
        (job / "summary.json").write_text(json.dumps({"status": "done", "metrics": values}))
    found = {metric.name: metric.values for metric in read_fold_metrics(tmp_path)}
    assert found == {"accuracy": (0.5, 0.7), "f1": (0.25, 0.75)}
