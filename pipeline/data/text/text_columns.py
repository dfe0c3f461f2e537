"""Columns of texts in CSV files, and in files with a JSON object on each line."""

from __future__ import annotations

import csv
import io
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from pathlib import Path

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.unpacked_file import open_unpacked
from pipeline.core.host.memory import require_room
from pipeline.data.file_errors import name_file
from pipeline.data.json_lines import PACKED, holds_json_lines, parse_objects, require_characters
from pipeline.data.text.text_format import ROOM_PER_BYTE, decode_text, read_text

MAX_FIELD = 2**30
"""The most characters of a field of a CSV, which is in memory anyway."""


def read_text_columns(
    file: Path, columns: Sequence[str], encoding: str = "utf-8"
) -> list[tuple[str, ...]]:
    """Return the values of columns for each row of a CSV file, whose first line has the names
    of the columns, or of the objects on the lines of a file that `holds_json_lines`.

    Raises DataError for a missing column or field, without rows, and for another encoding.
    """
    with name_file(file):
        text = _read_unpacked(file, encoding)
        if holds_json_lines(file):
            return [row for _, row in _parse_objects(text, columns)]
        if "\0" in text:
            raise ValueError("isn't a CSV: it holds zero bytes")
        with _read_long_fields():
            return _parse_rows(text, columns)


def make_locate(file: Path, rows: np.ndarray, encoding: str = "utf-8") -> Callable[[int], str]:
    """Return a function that returns the place of a sample, such as "texts.csv, line 2". `rows` has
    the row of each sample, int (n,), among the rows of `read_text_columns`. The file is read again
    by the first call."""

    @cache
    def read_lines() -> array[int]:
        with name_file(file):
            return array("q", _number_lines(file, _read_unpacked(file, encoding)))

    def locate(sample: int) -> str:
        return f"{file}, line {read_lines()[int(rows[sample])]:,}"

    return locate


def _read_unpacked(file: Path, encoding: str) -> str:
    """Return the text of a file, which may be compressed. Raises as `read_text` does."""
    if file.suffix.lower() not in PACKED or not file.is_file():
        return read_text(file, encoding)
    with open_unpacked(file) as unpacked:
        content = unpacked.read()
    require_room(ROOM_PER_BYTE * len(content), f"the text of {file.name}")
    return decode_text(content, encoding).removeprefix("\ufeff")


def _number_lines(file: Path, text: str) -> Iterator[int]:
    """Yield the number of the last line of each row of a file's text."""
    if holds_json_lines(file):
        yield from (number for number, _ in _parse_objects(text, ()))
        return
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    # The limit is the interpreter's, so it is back before another code runs.
    with _read_long_fields():
        numbers = array("q", (reader.line_num for _ in reader))
    yield from numbers


def _parse_objects(text: str, columns: Sequence[str]) -> list[tuple[int, tuple[str, ...]]]:
    """Return the number of each line that isn't empty, from 1, and its columns. Raises ValueError
    for a line that isn't an object, and for a column that isn't a text of whole characters."""
    rows = []
    for number, document in parse_objects(io.StringIO(text, newline=None), columns):
        for column in columns:
            if column not in document:
                listed = ", ".join(map(show_name, list(document)[:20])) or "nothing"
                raise ValueError(f"line {number:,} has no {show_name(column)}; it has {listed}")
            if not isinstance(document[column], str):
                kind = type(document[column]).__name__
                raise ValueError(f"line {number:,}: {show_name(column)} is {kind}; must be a text")
            require_characters(number, column, document[column])
        rows.append((number, tuple(document[column] for column in columns)))
    if not rows:
        raise ValueError("has no rows")
    return rows


@contextmanager
def _read_long_fields() -> Iterator[None]:
    """Read fields of up to `MAX_FIELD` characters in the body. Raises ValueError for what isn't a
    CSV."""
    limit = csv.field_size_limit(MAX_FIELD)
    try:
        yield
    except csv.Error as error:
        raise ValueError(str(error)) from error
    finally:
        csv.field_size_limit(limit)


def _parse_rows(text: str, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the rows of `read_text_columns`. Raises ValueError, and csv.Error for wrong quotes."""
    reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
    names = reader.fieldnames or []
    missing = [column for column in columns if column not in names]
    if missing:
        listed = ", ".join(map(show_name, names[:20])) or "nothing"
        raise ValueError(f"has no column {', '.join(map(show_name, missing))}; it has {listed}")
    repeated = [column for column in columns if names.count(column) > 1]
    if repeated:
        raise ValueError(f"has the column {show_name(repeated[0])} more than once")
    rows = []
    for row in reader:
        if None in row or None in row.values():
            raise ValueError(
                f"line {reader.line_num} doesn't have {len(names)} fields; a field with a "
                "comma must be quoted"
            )
        rows.append(tuple(row[column] for column in columns))
    if not rows:
        raise ValueError("has no rows")
    return rows
