"""Texts of values, lists and tables for messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from datetime import datetime, timedelta
from typing import Any

import yaml

from pipeline.core.errors import printable, shorten

MOST_S = 1e9
"""Longest time that is shown, in seconds: 32 years."""


def show(value: Any) -> str:
    """Return a value as it would be typed, in at most 60 characters."""
    if value is None or isinstance(value, bool):
        return {None: "null", True: "true", False: "false"}[value]
    try:
        text = str(value)
    except ValueError:
        # Python refuses to print a number of more than 4300 digits.
        text = f"a number of {value.bit_length():,} bits"
    if isinstance(value, str) and not _is_plain_text(value):
        text = f"'{value}'"
    # More than is shown, since secrets are hidden before the text is cut.
    return shorten(printable(text[:8192]), 60)


def join_first(
    texts: Sequence[str], max_count: int, separator: str = ", ", before_more: str = " and "
) -> str:
    """Return the first `max_count` texts, joined, with `before_more` and the number of others."""
    num_left = len(texts) - max_count
    ending = f"{before_more}{num_left:,} more" if num_left > 0 else ""
    return separator.join(texts[:max_count]) + ending


def align_columns(rows: Sequence[Sequence[str]], right: Collection[int] = ()) -> list[str]:
    """Return a line for each row, with aligned cells; the columns in `right` are right-aligned."""
    widths = [max(len(row[column]) for row in rows) for column in range(len(rows[0]))]
    return [
        "  ".join(
            cell.rjust(width) if column in right else cell.ljust(width)
            for column, (cell, width) in enumerate(zip(row, widths, strict=True))
        ).rstrip()
        for row in rows
    ]


def count_noun(count: int, noun: str, plural: str | None = None) -> str:
    """Return a number with its noun: 1 step, 1,760 steps. `plural` defaults to the noun and s."""
    return f"{count:,} {noun if count == 1 else plural or noun + 's'}"


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, with a decimal unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def format_duration(seconds: float) -> str:
    """Return a time as text in the units that a person would use: 1.9 s, 12 min, 2 h 5 min, 15.6
    days.

    At most `MOST_S`, 32 years.
    """
    seconds = min(max(seconds, 0.0), MOST_S)
    if seconds < 9.95:
        return f"{seconds:.2g} s" if seconds < 0.095 else f"{seconds:.1f} s"
    if seconds < 90:
        return f"{seconds:.0f} s"
    minutes = round(seconds / 60)
    if minutes < 90:
        return f"{minutes} min"
    hours, minutes = divmod(minutes, 60)
    if hours < 36:
        return f"{hours} h {minutes} min" if minutes else f"{hours} h"
    days, hours = divmod(round(seconds / 3600), 24)
    if days >= 7:
        return f"{round(seconds / 86400, 1 if days < 100 else None):,g} days"
    return f"{count_noun(days, 'day')} {hours} h" if hours else count_noun(days, "day")


def format_moment(seconds: float, now: datetime) -> str:
    """Return the local time in `seconds` after `now`, with the date unless it is today's: 14:20:05,
    14:20 if it is more than ten minutes away, Sat 5 Dec 14:20."""
    moment = now + timedelta(seconds=min(max(seconds, 0.0), MOST_S))
    if moment.date() == now.date():
        return f"{moment:%H:%M:%S}" if seconds < 600 else f"{moment:%H:%M}"
    year = f" {moment.year}" if moment.year != now.year else ""
    return f"{moment:%a} {moment.day} {moment:%b}{year} {moment:%H:%M}"


def _is_plain_text(text: str) -> bool:
    """Return whether YAML reads `text` as a text; True for more than 60 characters, unchecked."""
    if len(text) > 60:
        return True
    try:
        return isinstance(yaml.safe_load(text or "x"), str)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False
