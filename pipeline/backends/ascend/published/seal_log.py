"""The log of the scores of sealed rows, which are scored at most once in seven days.

Each line has the date, the commit of the code, the number of fits that were tried until then, a
group of rows, and its score.
"""

from __future__ import annotations

import csv
from collections.abc import Mapping, Sequence
from datetime import date, timedelta
from pathlib import Path

from pipeline.core.errors import RunError

SEAL_LOG = Path(__file__).with_name("seal_log.csv")
SEALED_FOR = timedelta(days=7)
"""Least time between two scores. Changes between frequent scores would fit the sealed rows."""
COLUMNS = (
    "date",
    "commit",
    "fits_tried",
    "group",
    "rows",
    "mean_error",
    "median_error",
    "kendall_tau",
    "coverage",
    "crps",
)


def check_seal(today: date, log: Path = SEAL_LOG) -> None:
    """Raise RunError if the last score is less than `SEALED_FOR` old, or the log is damaged."""
    last = _read_last_date(log)
    if last is None:
        return
    opens = last + SEALED_FOR
    if today < opens:
        raise RunError(
            f"--seal: the sealed rows were scored on {last}, and it is {today}; they are scored at "
            f"most once in {SEALED_FOR.days} days, so the next score is on {opens} ({log.name})"
        )


def append_scores(rows: Sequence[Mapping[str, object]], log: Path = SEAL_LOG) -> None:
    """Append a line for each row, which has a value for each of `COLUMNS`."""
    is_new = not log.exists()
    with log.open("a", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, COLUMNS, lineterminator="\n")
        if is_new:
            writer.writeheader()
        writer.writerows(rows)


def _read_last_date(log: Path) -> date | None:
    try:
        with log.open(newline="", encoding="utf-8") as lines:
            dates = [date.fromisoformat(row["date"]) for row in csv.DictReader(lines)]
    except FileNotFoundError:
        return None
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise RunError(
            f"{log}: not a log of scores ({error!r}); must be a CSV file with the columns "
            f"{', '.join(COLUMNS)}"
        ) from error
    return max(dates, default=None)
