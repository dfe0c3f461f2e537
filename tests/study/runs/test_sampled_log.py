"""A few lines of a log: the first, the last, and some between, whatever its length."""

from __future__ import annotations

import json
from math import inf, nan
from pathlib import Path
from typing import Any

import pytest

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import finite_number
from pipeline.study.runs.sampled_log import MAX_POINTS, LoggedCurve, sample_log


def write(path: Path, lines: list[dict[str, Any]]) -> Path:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))
    return path


@pytest.mark.parametrize("steps", [1, 2, 48, 1000, 50_000])
def test_curve_has_both_ends_and_few_points(tmp_path: Path, steps: int) -> None:
    lines = [{"step": step, "pass": 0, "loss": 1 / step} for step in range(1, steps + 1)]
    curves = sample_log(write(tmp_path / "metrics.jsonl", lines))
    assert set(curves) == {"loss"}
    curve = curves["loss"]
    assert (curve.steps[0], curve.steps[-1]) == (1, steps)
    assert list(curve.steps) == sorted(set(curve.steps))
    assert curve.values == tuple(1 / step for step in curve.steps)
    assert min(steps, 2) <= len(curve.steps) <= MAX_POINTS + 1
    gaps = [b - a for a, b in zip(curve.steps, curve.steps[1:], strict=False)]
    assert max(gaps, default=0) <= max(1, 3 * steps // MAX_POINTS)


def test_invalid_and_partial_lines_are_skipped(tmp_path: Path) -> None:
    log = tmp_path / "metrics.jsonl"
    log.write_bytes(b'{"step": 1, "loss": 2.0}\nno json\n{"step": 3, "loss": 1.0}\n{"step": 4, "l')
    assert sample_log(log) == {"loss": LoggedCurve((1, 3), (2.0, 1.0))}


def test_missing_log_is_reported(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"metrics\.jsonl: can't be read"):
        sample_log(tmp_path / "metrics.jsonl")


@pytest.mark.parametrize(
    ("value", "number"),
    [
        (2, 2),
        ({"macro": 0.5, "0": 1.0}, 0.5),
        ({"0": 1.0}, None),
        (True, None),
        ("2", None),
        (nan, None),
        (inf, None),
        (10**400, None),
        (None, None),
    ],
)
def test_finite_number_accepts_only_finite_numbers(value: Any, number: float | None) -> None:
    assert finite_number(value) == number
