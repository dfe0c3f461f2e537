"""Dates of a table: the common format of a column, and numbers computed from dates."""

from __future__ import annotations

import re
from collections.abc import Sequence
from contextlib import suppress
from datetime import datetime
from functools import lru_cache
from itertools import product

import numpy as np

from pipeline.data.table import DateColumn, DatePart

ISO = "iso"
"""Format such as 2024-01-31, also with a time. Offsets from UTC are dropped."""
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?!\d)")
_MAX_TRIED = 1000
"""Number of texts that are tried first, since it takes long to parse all with a wrong format."""
_YEAR = re.compile(r"\d{4}")
_DAYS = (
    *("%Y-%m-%d", "%Y/%m/%d", "%d.%m.%Y", "%d/%m/%Y", "%m/%d/%Y", "%d-%m-%Y", "%m-%d-%Y", "%Y-%m"),
    *("%d %b %Y", "%d-%b-%Y", "%d %B %Y", "%b %d, %Y", "%B %d, %Y"),
)
_TIMES = ("", " %H:%M", " %H:%M:%S", " %I:%M %p", " %I:%M:%S %p")
FORMATS = (ISO, *(day + time for day, time in product(_DAYS, _TIMES)))
"""Formats that are inferred, in order of preference."""
_DAY_PARTS: tuple[DatePart, ...] = ("days", "sin_year", "cos_year", "sin_week", "cos_week")
_HOUR_PARTS: tuple[DatePart, ...] = ("sin_day", "cos_day")
_EPOCH = datetime(1970, 1, 1)


def find_date_formats(texts: Sequence[str]) -> list[str]:
    """Return the formats that fit all texts: none, one, or two if days and months are ambiguous.
    Of formats with the same dates only the first is returned."""
    if not texts or not _YEAR.search(texts[0]):
        return []
    candidates = [name for name in FORMATS if _parse(texts[0], name) is not None]
    formats: dict[bytes, str] = {}
    for name in candidates:
        if all(_parse(text, name) is not None for text in texts[:_MAX_TRIED]):
            days = parse_days(texts, name)
            if not np.isnan(days).any():
                formats.setdefault(days.tobytes(), name)
    return list(formats.values())


def parse_days(texts: Sequence[str], date_format: str) -> np.ndarray:
    """Return dates as days since 1970 with times as fractions, float64 (texts,); NaN if a text
    doesn't have the format."""
    dates = (_parse(text, date_format) for text in texts)
    days = (np.nan if date is None else (date - _EPOCH).total_seconds() / 86_400 for date in dates)
    return np.fromiter(days, np.float64, len(texts))


def format_example_date(date_format: str) -> str:
    """Return a date in a format. Raises ValueError if it has no year, or can't be read again."""
    date = datetime(2024, 1, 31)
    if date_format == ISO:
        return f"{date:%Y-%m-%d}"
    example = date.strftime(date_format)
    if "%y" not in date_format.lower() or _parse(example, date_format) is None:
        raise ValueError(
            f"{date_format!r:.60}: must be a format of dates with their year, such as %d/%m/%Y"
        )
    return example


def list_date_parts(days: np.ndarray) -> tuple[DatePart, ...]:
    """Return the names of the parts of dates, with parts of the day if a date has a time."""
    has_hours = bool((days[~np.isnan(days)] % 1 != 0).any())
    return (*_DAY_PARTS, *_HOUR_PARTS) if has_hours else _DAY_PARTS


def compute_part_values(days: np.ndarray, date: DateColumn) -> np.ndarray:
    """Return a part of dates, float64 (dates,), NaN for a missing date. It is the number of days
    since the first date of the training split, or sine or cosine of the position in the year, week
    or day."""
    if date.part == "days":
        return days - date.first_day
    wave, _, cycle = date.part.partition("_")
    angle = 2 * np.pi * _compute_position(days, cycle)
    return np.sin(angle) if wave == "sin" else np.cos(angle)


def _compute_position(days: np.ndarray, cycle: str) -> np.ndarray:
    """Return the position in a day, a week from Monday on, or a year, from 0 to below 1."""
    if cycle == "day":
        return days % 1
    if cycle == "week":
        return (np.floor(days) + 3) % 7 / 7  # 1970 began on a Thursday
    date = np.floor(np.where(np.isnan(days), 0, days)).astype("datetime64[D]")
    year = date.astype("datetime64[Y]")
    first = year.astype("datetime64[D]")
    following = (year + np.timedelta64(1, "Y")).astype("datetime64[D]")
    share = (date - first).astype(np.float64) / (following - first).astype(np.float64)
    return np.where(np.isnan(days), np.nan, share)


def _parse(text: str, date_format: str) -> datetime | None:
    """Return the date of a text; None if it doesn't have the format."""
    if date_format == ISO:
        with suppress(ValueError):
            if _ISO_DATE.match(text):
                return datetime.fromisoformat(text).replace(tzinfo=None)
        return None
    time_at = max(date_format.find(" %H"), date_format.find(" %I"))
    if time_at < 0:
        return _parse_part(text, date_format)
    # A column of many dates with times has few different days and times, which are parsed once.
    words = text.rsplit(" ", date_format.count(" ", time_at))
    day = _parse_part(words[0], date_format[:time_at])
    time = _parse_part(" ".join(words[1:]), date_format[time_at + 1 :])
    return None if day is None or time is None else datetime.combine(day, time.time())


@lru_cache(maxsize=1 << 17)
def _parse_part(text: str, date_format: str) -> datetime | None:
    try:
        return datetime.strptime(text, date_format).replace(tzinfo=None)
    except ValueError:
        return None
