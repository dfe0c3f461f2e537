"""The status of a run counts while it is new; a damaged one is a ValueError."""

from __future__ import annotations

import json
import math
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from pipeline.study.runs.live_runs import read_live_status

STATUS = {"step": 3, "steps": 9, "loss": None, "step_ms": 2.0, "left_s": 1.0, "evaluation": None}


def write_status(folder: Path, written: datetime) -> None:
    (folder / "status.json").write_text(json.dumps({**STATUS, "written": written.isoformat()}))


def test_status_of_a_dead_run_is_ignored(tmp_path: Path) -> None:
    assert read_live_status(tmp_path) is None
    write_status(tmp_path, datetime.now(UTC))
    assert read_live_status(tmp_path) is not None
    write_status(tmp_path, datetime.now(UTC) - timedelta(seconds=61))
    assert read_live_status(tmp_path) is None


@pytest.mark.parametrize(
    ("content", "problem"),
    [
        ("", "Expecting value"),
        ("[]", "dictionary"),
        ("{", "Expecting property name"),
        ('{"step": 1e400}', "step"),
        (
            json.dumps({**STATUS, "left_s": math.nan, "written": "2026-11-26T09:00:00+00:00"}),
            "left_s = nan",
        ),
        (json.dumps({**STATUS, "written": "today"}), "Invalid isoformat"),
        (json.dumps({**STATUS, "written": "2026-11-26T09:00:00"}), "must have a time zone"),
    ],
    ids=["empty", "a list", "cut", "infinite", "not a number", "no date", "no time zone"],
)
def test_damaged_status_is_a_value_error(tmp_path: Path, content: str, problem: str) -> None:
    (tmp_path / "status.json").write_text(content)
    with pytest.raises(ValueError, match=problem):
        read_live_status(tmp_path)
