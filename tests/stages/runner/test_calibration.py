"""Temperature scaling against scikit-learn, and where a run uses it."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.config.compose import load_recipe
from pipeline.core.errors import RecipeError
from pipeline.stages.record.trained_run import read_temperature
from pipeline.stages.runner.calibration import (
    compute_calibration_error,
    compute_held_out_error,
    fit_temperature,
)
from pipeline.stages.runner.run_features import open_features
from pipeline.training.target_metrics import CalibrationError
from tests.conftest import ROOT
from tests.whole_run import run

GOLDEN = np.load(ROOT / "tests" / "golden" / "table_network.npz")


def test_temperature_golden_value_is_that_of_scikit_learn() -> None:
    found = fit_temperature(GOLDEN["logits"], GOLDEN["labels"], prior=False)
    assert found == pytest.approx(float(GOLDEN["temperature"]), rel=1e-3)


def test_calibration_error_is_the_metric_and_falls() -> None:
    logits, labels = GOLDEN["logits"], GOLDEN["labels"]
    metric = CalibrationError()
    sums = metric.sums(logits.astype(np.float32), labels, np.ones(len(labels), bool))
    before = compute_calibration_error(logits, labels)
    assert before == pytest.approx(metric.value(sums), abs=1e-6)
    assert compute_held_out_error(logits, labels) < 0.6 * before


def test_temperature_of_a_summary_is_one_without_a_valid_number(tmp_path: Path) -> None:
    file = tmp_path / "summary.json"
    assert read_temperature(file) == 1
    for text, expected in (("2.5", 2.5), ("0", 1), ("-1", 1), ("1e999", 1), ('"x"', 1)):
        file.write_text(f'{{"calibration": {{"temperature": {text}}}}}')
        assert read_temperature(file) == expected


def test_run_without_an_evaluation_is_refused() -> None:
    recipe = load_recipe("lenet5_digits", ["run_features=[calibrate]", "stages=[data,build]"])
    with pytest.raises(RecipeError, match="stages must have eval"):
        open_features(recipe)


@pytest.mark.medium
def test_ignored_labels_have_no_share_in_the_temperature(cache: Path, tmp_path: Path) -> None:
    keys = ["model=mlp", "model.hidden=[8]", "train.steps=5", "dataset.ignore_index=9"]
    off = ["monitor.tensorboard=false", f"cache.root={cache}", "run_features=[calibrate]"]
    summary = run(load_recipe("lenet5_digits", [*keys, *off]), tmp_path / "run")
    assert 20 < summary.metrics["count"] < summary.data["samples"]["eval"]
    assert summary.calibration["samples"] == summary.metrics["count"]


def test_few_samples_that_are_all_right_are_not_certain() -> None:
    logits = np.tile([[1.0, 0.0], [0.0, 1.0]], (15, 1))
    labels = np.tile([0, 1], 15)
    temperature = fit_temperature(logits, labels)
    # Platt: 1 - 1 / (n + C), which is the share of the true class at the least cross-entropy
    assert 1 / (1 + np.exp(-1 / temperature)) == pytest.approx(1 - 1 / 32, abs=1e-4)
    assert fit_temperature(logits, labels, prior=False) == pytest.approx(1 / 20, rel=1e-3)
