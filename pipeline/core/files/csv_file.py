"""CSV texts and files, whose rows all have the same columns.

Spreadsheets run a cell that begins like a formula, such as =cmd|... or @SUM(...). Names of files,
classes and columns come from strangers, so such texts get an apostrophe, which makes them texts.
"""

from __future__ import annotations

import csv
import io
import re
from collections.abc import Iterable, Mapping
from numbers import Number
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import convert_write_errors, write_whole

_SIGNS = "[=+\\-@\uff1d\uff0b\uff0d\uff20]"
"""The characters that begin a formula, also full-width."""
_FORMULA = re.compile(rf"[\t\r\n]|\s*{_SIGNS}")
_LATER_FORMULA = re.compile(rf"([;\t\r\n]\s*)(?={_SIGNS})")
"""A formula after a character that separates cells in some countries and programs."""
_PLAIN = re.compile(r"[+-]+|[+-]?(?:[\d.,_]+(?:e[+-]?\d+)?|inf|nan) ?%?", re.IGNORECASE | re.ASCII)
"""A number, or signs without one."""


def format_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a line with the names of columns, which are the first row's keys, and a line a row."""
    lines: list[str] = []
    for row in rows:
        if not lines:
            lines.append(format_line(row))
        lines.append(format_line(row.values()))
    return "".join(lines)


def format_line(values: Iterable[Any]) -> str:
    """Return values as a line of CSV, which ends in a newline. Texts that a spreadsheet would run
    are neutralised."""
    # With this line terminator, the writer also quotes a value with a lone carriage return.
    end = "\r\n"
    file = io.StringIO()
    csv.writer(file, lineterminator=end).writerow(map(_make_cell, values))
    return file.getvalue().removesuffix(end) + "\n"


def _make_cell(value: Any) -> Any:
    """Return a number or None as it is, and a text with an apostrophe before each formula in it."""
    if value is None or isinstance(value, Number):
        return value
    text = str(value)
    if _PLAIN.fullmatch(text):
        return text
    start = "'" if _FORMULA.match(text) else ""
    return start + _LATER_FORMULA.sub(r"\1'", text)


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, atomically. Raises RunError if the disk refuses."""
    with convert_write_errors(path):
        write_whole(path, format_csv(rows))
