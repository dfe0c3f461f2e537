"""CSV texts and files, whose rows all have the same columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.files.atomic_write import convert_write_errors, write_whole


def format_csv(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return a line with the names of columns, which are the first row's keys, and a line a row."""
    lines: list[str] = []
    for row in rows:
        if not lines:
            lines.append(format_line(row))
        lines.append(format_line(row.values()))
    return "".join(lines)


def format_line(values: Iterable[Any]) -> str:
    """Return values as a line of CSV, which ends in a newline."""
    # With this line terminator, the writer also quotes a value with a lone carriage return.
    end = "\r\n"
    file = io.StringIO()
    csv.writer(file, lineterminator=end).writerow(values)
    return file.getvalue().removesuffix(end) + "\n"


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, atomically. Raises RunError if the disk refuses."""
    with convert_write_errors(path):
        write_whole(path, format_csv(rows))
