"""CSV text and files, of rows that share their columns."""

from __future__ import annotations

import csv
import io
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole


def csv_text(rows: Iterable[Mapping[str, Any]]) -> str:
    """Return rows as CSV, after a line with the names of the first row's columns."""
    file = io.StringIO()
    writer = csv.writer(file, lineterminator="\n")
    for number, row in enumerate(rows):
        if not number:
            writer.writerow(row)
        writer.writerow(row.values())
    return file.getvalue()


def write_csv(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Write rows as a CSV file, atomically. Raises RunError if the file can't be written."""
    try:
        write_whole(path, csv_text(rows))
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from error
