"""The metric that runs are ranked by, and its direction."""

from __future__ import annotations

import pytest

from pipeline.study.runs.ranking import is_larger_better, main_metric

LOSS = {"train_loss": 0.1, "steps": 9.0, "step_ms": 2.0}
EVALUATED = {**LOSS, "accuracy": 0.9, "loss": 0.3, "f1": 0.9, "train_accuracy": 1.0}


def test_accuracy_is_preferred_to_a_more_frequent_loss() -> None:
    assert main_metric([EVALUATED, LOSS, LOSS, LOSS]) == "accuracy"
    assert main_metric([LOSS, {**LOSS, "loss": 0.3}, LOSS]) == "loss"
    assert main_metric([LOSS, LOSS]) == "train_loss"


def test_more_frequent_metric_is_preferred_to_accuracy() -> None:
    numbers = {**LOSS, "loss": 0.3, "rmse": 0.5}
    assert main_metric([EVALUATED, numbers, numbers]) == "rmse"


def test_speeds_are_not_metrics() -> None:
    assert main_metric([{"step_ms": 2.0, "steps": 9.0, "parameters": 7.0}]) is None
    assert main_metric([]) is None


@pytest.mark.parametrize(
    ("figure", "larger"),
    [("accuracy", True), ("loss", False), ("train_loss", False), ("rmse", False), ("steps", True)],
)
def test_directions_of_metrics_are_defined(figure: str, larger: bool) -> None:
    assert is_larger_better(figure) is larger
