from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.engine.monitors.log_lines import read_lines
from pipeline.stages.record.run_record import Discrepancy, compare_steps, find_discrepancy
from pipeline.training.telemetry import Telemetry


def line(step: int, **numbers: Any) -> dict[str, Any]:
    plain = {"loss": 1.5, "learning_rate": 0.1, "grad_norm": 2.5, "loss_scale": 1.0}
    return {"step": step, "epoch": 1, "sink": 1, **plain, **numbers}


def write(file: Path, lines: Sequence[Mapping[str, Any]], tail: str = "") -> Path:
    file.write_text("".join(json.dumps(entry) + "\n" for entry in lines) + tail)
    return file


@pytest.fixture
def pair(tmp_path: Path) -> Any:
    def compare(one: Sequence[Any], other: Sequence[Any]) -> Any:
        return compare_steps(write(tmp_path / "one", one), write(tmp_path / "other", other))

    return compare


STEPS = [line(step) for step in range(1, 6)]


def test_equal_logs_do_not_differ(pair: Any) -> None:
    found = pair(STEPS, STEPS)
    assert (found.steps, found.differing, found.first, found.largest_loss) == (5, 0, None, None)
    assert (found.only_one, found.only_other) == (0, 0)


def test_sink_length_is_not_a_difference(pair: Any) -> None:
    assert pair(STEPS, [line(step, sink=step) for step in range(1, 6)]).differing == 0


def test_first_and_largest_difference_are_reported(pair: Any) -> None:
    loss = np.nextafter(np.float32(1.5), np.float32(2))
    other = [*STEPS[:2], line(3, loss=float(str(loss))), line(4, loss=1.25), STEPS[4]]
    found = pair(STEPS, other)
    assert (found.steps, found.differing) == (5, 2)
    assert str(found.first) == (
        "step 3: loss 1.5 and 1.5000001, 1e-07 apart (1 in the last place of float32)"
    )
    assert (found.largest_loss.step, found.largest_loss.distance) == (4, 0.25)


def test_differences_of_any_number_are_listed(pair: Any) -> None:
    for name, value in (("learning_rate", 0.2), ("grad_norm", 1.0), ("loss_scale", 2.0)):
        found = pair(STEPS, [*STEPS[:4], line(5, **{name: value})])
        assert (found.first.step, found.first.name, found.first_loss) == (5, name, None)
    assert pair(STEPS, [*STEPS[:4], line(5, skipped=True)]).first.name == "skipped"


def test_non_finite_numbers_equal_only_each_other(pair: Any) -> None:
    diverged = [*STEPS[:4], line(5, loss=None)]
    assert pair(diverged, diverged).first is None
    found = pair(STEPS, diverged).first
    assert (found.step, found.distance) == (5, math.inf)
    assert str(found) == "step 5: loss 1.5 and not finite"


def test_missing_number_differs_from_one_that_is_not_finite(pair: Any) -> None:
    diverged = [*STEPS[:4], line(5, accuracy=None)]
    found = pair(diverged, STEPS)
    assert (found.differing, found.first.distance) == (1, math.inf)
    assert str(found.first) == "step 5: accuracy not finite and missing"


def test_distance_in_last_places_spans_zero(pair: Any) -> None:
    """There are two zeros between the smallest numbers of either sign."""
    tiny = float(np.finfo(np.float32).smallest_subnormal)
    found = pair([line(1, loss=-tiny)], [line(1, loss=tiny)])
    assert "2 in the last place" in str(found.first)


def test_missing_steps_are_counted(pair: Any) -> None:
    found = pair(STEPS, STEPS[:3])
    assert (found.steps, found.only_one, found.only_other) == (3, 2, 0)
    found = pair(STEPS[3:], STEPS)
    assert (found.steps, found.only_one, found.only_other, found.first) == (2, 0, 3, None)


def test_partial_last_line_is_ignored(tmp_path: Path) -> None:
    whole = write(tmp_path / "whole", STEPS)
    truncated = write(tmp_path / "truncated", STEPS[:3], tail='{"step": 4, "lo')
    assert compare_steps(whole, truncated).only_one == 2


def test_invalid_line_is_refused(tmp_path: Path) -> None:
    """Also where the other log has come to its end before."""
    whole = write(tmp_path / "whole", STEPS)
    longer = write(tmp_path / "longer", STEPS, tail="nothing\n")
    with pytest.raises(DataError, match="longer, line 6: isn't a step of a run"):
        compare_steps(whole, longer)


def _make_telemetry(start: int, steps: int) -> Telemetry:
    numbers = {"loss": 1.5, "learning_rate": 0.1, "grad_norm": 2.5, "loss_scale": 1.0}
    return Telemetry(start, {name: np.full(steps, number, "f") for name, number in numbers.items()})


def test_telemetry_is_compared_with_the_steps_of_a_log(tmp_path: Path) -> None:
    log = write(tmp_path / "log", STEPS)
    assert find_discrepancy(read_lines(log), _make_telemetry(0, 5)) is None
    assert find_discrepancy(read_lines(log), _make_telemetry(2, 2)) is None
    assert find_discrepancy(read_lines(log), _make_telemetry(4, 2)) == Discrepancy(
        6, "loss", None, 1.5
    )
    above = float(np.nextafter(np.float32(2.5), np.float32(3)))
    changed = write(tmp_path / "changed", [*STEPS[:3], line(4, grad_norm=above), STEPS[4]])
    assert find_discrepancy(read_lines(changed), _make_telemetry(0, 3)) is None
    assert find_discrepancy(read_lines(changed), _make_telemetry(0, 5)) == Discrepancy(
        4, "grad_norm", above, 2.5
    )
    flagged = write(tmp_path / "flagged", [*STEPS[:4], line(5, skipped=True)])
    assert find_discrepancy(read_lines(flagged), _make_telemetry(0, 5)) == Discrepancy(
        5, "skipped", 1.0, 0.0
    )


def test_speeds_of_a_log_are_not_compared_with_repeated_steps(tmp_path: Path) -> None:
    log = write(tmp_path / "log", [line(1, labels_per_s=1234.0), line(2, labels_per_s=1e3)])
    assert find_discrepancy(read_lines(log), _make_telemetry(0, 2)) is None
