"""Patience with a metric: when training ends, and that a checkpoint continues the count."""

from __future__ import annotations

from math import nan

import pytest

from pipeline.engine.callbacks.callback import Evaluation
from pipeline.engine.early_stop import EarlyStop


def evaluation(loss: float) -> Evaluation:
    return Evaluation({"loss": loss, "accuracy": -loss, "count": 8}, None)


def evaluations_until_stop(stop: EarlyStop, losses: list[float]) -> int:
    for count, loss in enumerate(losses, start=1):
        stop.add(evaluation(loss))
        if stop.is_over:
            return count
    return 0


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "count"),
    [
        ([3, 2, 1], 1, 0.0, 0),
        ([3, 3], 1, 0.0, 2),
        ([3, 4, 2, 4, 5], 2, 0.0, 5),
        ([3, 2.9, 2.8, 2.6], 3, 0.5, 4),
        ([nan, nan], 2, 0.0, 2),
        ([3, nan, 2], 2, 0.0, 0),
    ],
)
def test_early_stop_ends_training_after_patience(
    losses: list[float], patience: int, min_delta: float, count: int
) -> None:
    for metric, better in (("loss", "min"), ("accuracy", "max")):
        stop = EarlyStop(metric, better, patience, min_delta)  # type: ignore[arg-type]
        assert evaluations_until_stop(stop, losses) == count


def test_early_stop_without_a_metric_never_stops() -> None:
    assert evaluations_until_stop(EarlyStop(), [1.0] * 20) == 0


@pytest.mark.parametrize("cut", range(5))
def test_restored_early_stop_continues_the_count(cut: int) -> None:
    losses = [3.0, 2.0, 2.5, 2.4, 2.1]
    before = EarlyStop("loss", "min", 3)
    for loss in losses[:cut]:
        before.add(evaluation(loss))
    after = EarlyStop("loss", "min", 3)
    after.progress = before.progress
    assert evaluations_until_stop(after, losses[cut:]) == 5 - cut
    assert after.reason == "loss no better than 2.0"


def test_nan_metric_is_the_stop_reason() -> None:
    stop = EarlyStop("loss", "min", 2)
    assert evaluations_until_stop(stop, [nan, nan]) == 2
    assert stop.reason == "loss is no number in 2 evaluations"
