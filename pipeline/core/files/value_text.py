"""Texts of values, lists and tables for messages."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import yaml

from pipeline.core.errors import printable, shorten


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
    return printable(shorten(text, 60))


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


def format_bytes(count: float) -> str:
    """Return a number of bytes as text, with a decimal unit."""
    for unit, size in (("GB", 1e9), ("MB", 1e6), ("kB", 1e3)):
        if count >= size:
            return f"{count / size:,.1f} {unit}"
    return f"{count:,.0f} B"


def _is_plain_text(text: str) -> bool:
    """Return whether YAML reads `text` as a text; True for more than 60 characters, unchecked."""
    if len(text) > 60:
        return True
    try:
        return isinstance(yaml.safe_load(text or "x"), str)
    except (yaml.YAMLError, ValueError, LookupError, AttributeError, TypeError, RecursionError):
        return False
