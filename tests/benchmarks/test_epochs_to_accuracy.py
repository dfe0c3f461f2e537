"""The table of `benchmarks.epochs_to_accuracy` names runs that never get there, or diverge."""

from __future__ import annotations

import math
import sys

import pytest

from benchmarks import epochs_to_accuracy
from benchmarks.epochs_to_accuracy import Course


def test_run_below_the_accuracy_counts_as_never(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    courses = {
        ("fast", "1"): Course(1.0, 2.0, 0.5, 0.99),
        ("fast", "2"): Course(3.0, 6.0, 0.5, 0.99),
        ("fast", "3"): Course(None, None, 0.5, 0.97),
        ("slow", "1"): Course(1.0, 2.0, 0.5, 0.99),
        ("slow", "2"): Course(None, None, 0.5, 0.97),
        ("slow", "3"): Course(None, None, math.nan, math.nan),
    }

    def train(contestant: str, overrides: list[str], accuracy: float) -> Course:
        assert accuracy == 0.98
        seed = overrides[-1].removeprefix("seed=")
        return courses[contestant, seed]

    monkeypatch.setattr(epochs_to_accuracy, "_train", train)
    monkeypatch.setattr(sys, "argv", ["epochs_to_accuracy", "--accuracy=0.98", "fast", "slow"])
    epochs_to_accuracy.main()
    said = capsys.readouterr().out
    assert "| fast | 3.00 | 1.00, 3.00, never | 6.00 | 0.50 | 0.9900 |" in said
    assert "| slow | never | 1.00, never, never | never | 0.50 | 0.9800 |" in said
