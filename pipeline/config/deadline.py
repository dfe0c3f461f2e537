"""Deadlines of a run: the time that `train.minutes` or `train.until` names."""

from __future__ import annotations

import re
import time
from collections.abc import Iterator
from datetime import datetime, timedelta
from datetime import time as time_of_day
from typing import TYPE_CHECKING, Annotated

from pydantic import AfterValidator

from pipeline.core.errors import RecipeError
from pipeline.core.registry import Expected

if TYPE_CHECKING:
    from pipeline.config.recipe import TrainSpec

MAX_MINUTES = 366 * 24 * 60
"""Longest time from a run's start to its deadline: a year, which may be a leap year."""
FORMS = "a time such as 18:00, or a date with a time such as 2027-01-31T18:00+01:00"


def require_clock_time(text: str) -> str:
    """Return a clock time that `find_clock_time` can read. Raises ValueError for other texts."""
    try:
        _parse_clock_time(text)
    except ValueError:
        raise ValueError(f"must be {FORMS}") from None
    return text


# YAML reads 18:00 without quotes as the base-60 number 1080.
ClockTime = Annotated[
    str, AfterValidator(require_clock_time), Expected(f"{FORMS}, as text in quotes")
]
"""A time of day, which is the next moment when the local clock shows it, or a date with a time."""


def _parse_clock_time(text: str) -> time_of_day | datetime:
    """Parse H:MM, HH:MM, either with seconds, or a date with a time in ISO 8601. Raises ValueError
    for others."""
    text = f"0{text}" if text[1:2] == ":" else text
    parsed = datetime.fromisoformat(text) if "-" in text else time_of_day.fromisoformat(text)
    without_offset = re.sub(r"[+-][\d:.]+$", "", text)
    if ":" not in without_offset or (isinstance(parsed, time_of_day) and parsed.tzinfo is not None):
        raise ValueError("has no minutes, or an offset without a date")
    if isinstance(parsed, datetime):
        parsed.timestamp()  # raises ValueError for the first or last local hours of years 1 to 9999
    return parsed


def find_clock_time(text: str, now_s: float) -> float:
    """Return a clock time as seconds since 1970.

    For a time of day, this is the next moment after `now_s` when the local clock shows it. If the
    clock is put forward and skips the time, the moment is later by as much as the clock is put
    forward.
    """
    parsed = _parse_clock_time(text)
    if isinstance(parsed, datetime):
        return parsed.timestamp()
    return min(moment_s for moment_s in _list_moments(parsed, now_s) if moment_s > now_s)


def _list_moments(clock_time: time_of_day, now_s: float) -> Iterator[float]:
    """Yield the moments when the clock shows a time today and tomorrow, in seconds since 1970.

    There are two for each day, which are equal unless the clock shows the time twice.
    """
    today = datetime.fromtimestamp(now_s).date()
    for days in (0, 1):
        local_time = datetime.combine(today + timedelta(days=days), clock_time)
        first_s = local_time.timestamp()
        yield first_s
        # The second one is earlier than `first_s` if the clock skips the time.
        yield max(first_s, local_time.replace(fold=1).timestamp())


def find_deadline(train: TrainSpec, started_at: float) -> float | None:
    """Return the time of `time.perf_counter` at which the command must end; None if never.

    `started_at` is the command's start by the same clock. Raises RecipeError if `train.until` is
    before it, or more than a year later.
    """
    if train.minutes is not None:
        return started_at + 60 * train.minutes
    if train.until is None:
        return None
    # The clock is read once, so that a change of the clock doesn't move the deadline.
    start_s = time.time() - time.perf_counter() + started_at
    until_s = find_clock_time(train.until, start_s)
    if until_s <= start_s:
        raise RecipeError(f"train.until = {train.until}: is past; must be a later time")
    if until_s - start_s > 60 * MAX_MINUTES:
        raise RecipeError(f"train.until = {train.until}: must be within a year")
    return started_at + until_s - start_s
