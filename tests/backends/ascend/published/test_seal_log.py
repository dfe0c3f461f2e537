"""The log of scores opens once in seven days."""

from __future__ import annotations

from datetime import date
from pathlib import Path

import pytest

from pipeline.backends.ascend.published.seal_log import COLUMNS, append_scores, check_seal
from pipeline.core.errors import RunError

ROW = dict.fromkeys(COLUMNS, "0")


@pytest.mark.parametrize("today", [date(2026, 3, 1), date(2026, 3, 7), date(2026, 2, 1)])
def test_score_within_seven_days_is_refused(today: date, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    append_scores([ROW | {"date": date(2026, 3, 1)}, ROW | {"date": date(2026, 1, 1)}], log)
    with pytest.raises(RunError) as raised:
        check_seal(today, log)
    assert str(raised.value) == (
        f"--seal: the sealed rows were scored on 2026-03-01, and it is {today}; they are scored at "
        "most once in 7 days, so the next score is on 2026-03-08 (log.csv)"
    )


def test_score_after_seven_days_is_appended(tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    check_seal(date(2026, 3, 1), log)
    append_scores([ROW | {"date": date(2026, 3, 1)}], log)
    check_seal(date(2026, 3, 8), log)
    append_scores([ROW | {"date": date(2026, 3, 8)}], log)
    head, *lines = log.read_text().splitlines()
    assert head == ",".join(COLUMNS)
    assert [line[:10] for line in lines] == ["2026-03-01", "2026-03-08"]


@pytest.mark.parametrize("text", ["a,b\n1,2\n", "date,commit\nyesterday,x\n"])
def test_damaged_log_is_refused(text: str, tmp_path: Path) -> None:
    log = tmp_path / "log.csv"
    log.write_text(text)
    with pytest.raises(RunError, match=r"not a log of scores .* must be a CSV file with the"):
        check_seal(date(2026, 3, 1), log)
