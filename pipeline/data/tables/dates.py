"""Dates of a table: the format of a column's dates, and numbers that are computed from them."""

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
"""The format of dates such as 2024-01-31, also with a time. Offsets from UTC are dropped."""
_ISO_DATE = re.compile(r"\d{4}-\d{2}-\d{2}(?!\d)")
_MAX_TRIED = 1000
"""Number of texts that a format is tried on first. Parsing all takes long."""
_YEAR = re.compile(r"\d{4}")
_DAY_DIRECTIVE = re.compile("%[^HIMSfpzZ%]")
"""A part of a format that stands for a part of the day, as the year after the time of `ctime`."""
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
    """Return the formats that fit all texts: none, one, or two if day and month can be exchanged.
    If several formats result in the same dates, only the first of them is returned."""
    if not texts or not _YEAR.search(texts[0]):
        return []
    formats: dict[bytes, str] = {}  # by the dates that they result in
    for name in FORMATS:
        if all(_parse(text, name) is not None for text in texts[:_MAX_TRIED]):
            days = parse_days(texts, name)
            if not np.isnan(days).any():
                formats.setdefault(days.tobytes(), name)
    return list(formats.values())


def parse_days(texts: Sequence[str], date_format: str) -> np.ndarray:
    """Return dates as days since 1970, float64 (texts,). A text of another format is NaN."""
    days = np.full(len(texts), np.nan)
    for row, text in enumerate(texts):
        date = _parse(text, date_format)
        if date is not None:
            days[row] = (date - _EPOCH).total_seconds() / 86_400
    return days


def format_example_date(date_format: str) -> str:
    """Return an example of a date in a format. Raises ValueError for a format without a year, and
    for a format by which dates can't be parsed."""
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
    """Return the parts to compute from dates, with parts of the day if a date has a time."""
    has_hours = bool((days[~np.isnan(days)] % 1 != 0).any())
    return (*_DAY_PARTS, *_HOUR_PARTS) if has_hours else _DAY_PARTS


def compute_part_values(days: np.ndarray, date: DateColumn) -> np.ndarray:
    """Return the numbers that `DateColumn` describes, float64 (dates,); NaN for a missing date."""
    if date.part == "days":
        return days - date.first_day
    wave, _, cycle = date.part.partition("_")
    angle = 2 * np.pi * _compute_position(days, cycle)
    return np.sin(angle) if wave == "sin" else np.cos(angle)


def _compute_position(days: np.ndarray, cycle: str) -> np.ndarray:
    """Return the positions of dates in their day, week (from Monday) or year, from 0 to below 1."""
    if cycle == "day":
        return days % 1
    if cycle == "week":
        return (np.floor(days) + 3) % 7 / 7  # 1970 began on a Thursday
    date = np.floor(np.where(np.isnan(days), 0, days)).astype("datetime64[D]")
    year = date.astype("datetime64[Y]")
    year_start = year.astype("datetime64[D]")
    year_end = (year + np.timedelta64(1, "Y")).astype("datetime64[D]")
    share = (date - year_start).astype(np.float64) / (year_end - year_start).astype(np.float64)
    return np.where(np.isnan(days), np.nan, share)


def _parse(text: str, date_format: str) -> datetime | None:
    """Return the date of a text; None if it doesn't have the format."""
    if date_format == ISO:
        with suppress(ValueError):
            if _ISO_DATE.match(text):
                return datetime.fromisoformat(text).replace(tzinfo=None)
        return None
    time_start = max(date_format.find(" %H"), date_format.find(" %I"))
    if time_start < 0 or _DAY_DIRECTIVE.search(date_format, time_start):
        return _parse_part(text, date_format)
    # Days and times are parsed apart, since a column has few different ones, which are cached.
    words = text.rsplit(" ", date_format.count(" ", time_start))
    day = _parse_part(words[0], date_format[:time_start])
    time = _parse_part(" ".join(words[1:]), date_format[time_start + 1 :])
    return None if day is None or time is None else datetime.combine(day, time.time())


@lru_cache(maxsize=1 << 17)
def _parse_part(text: str, date_format: str) -> datetime | None:
    try:
        return datetime.strptime(text, date_format).replace(tzinfo=None)
    except ValueError:
        return None
