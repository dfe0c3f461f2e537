"""Functions that read text files, whole or by lines, and columns of texts in CSV files."""

from __future__ import annotations

import csv
import io
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.data.file_errors import name_file
from pipeline.data.text.tokenizer import decode_utf8

MAX_TEXT_BYTES = 16 * 2**30
ROOM_PER_BYTE = 24
"""Bytes of memory for each byte of a text, for its bytes, characters and tokens, with copies."""
MAX_FIELD = 2**20
"""The most characters of a field of a CSV."""


def list_text_files(root: Path, pattern: str) -> list[Path]:
    """Return `root` if it is a file, else the files in it that match `pattern`, sorted. Raises
    DataError if none match, and for links out of `root`."""
    if root.is_file():
        return [root]
    if not root.is_dir():
        raise DataError(f"{root}: there is no such file or folder")
    files = sorted(path for path in root.glob(pattern) if path.is_file())
    if not files:
        raise DataError(
            f"{root}: holds no file that matches dataset.pattern = {show_name(pattern)}"
        )
    resolved_root = root.resolve()
    for file in files:
        if not file.resolve().is_relative_to(resolved_root):
            raise DataError(f"{file}: leads out of {root}, to {file.resolve()}; copy its target")
    return files


def read_files(files: list[Path]) -> list[bytes]:
    """Return the content of each file. Raises DataError for an unreadable file, or too little
    memory."""
    size_bytes = 0
    for file in files:
        with name_file(file):
            size_bytes += file.stat().st_size
    with name_file(files[0].parent):
        description = f"{len(files):,} files of {size_bytes / 1e6:,.1f} MB"
        require_room(ROOM_PER_BYTE * size_bytes, description)
    return [_read_file(file) for file in files]


def read_text_lines(file: Path) -> list[str]:
    """Return the stripped lines of a text file that aren't empty. Raises DataError without any."""
    with name_file(file):
        # Windows writes a byte order mark. Only \n, \r\n and \r end a line.
        text = decode_utf8(_read_file(file)).removeprefix("\ufeff")
        lines = [line.strip() for line in io.StringIO(text, newline=None)]
    texts = [line for line in lines if line]
    if not texts:
        raise DataError(f"{file}: holds no text; must have one on each line")
    return texts


def read_text_columns(file: Path, columns: Sequence[str]) -> list[tuple[str, ...]]:
    """Return the values of columns for each row of a CSV file, whose first line has the names
    of the columns. Raises DataError for a missing column or field, and without rows."""
    with name_file(file):
        # Excel writes a byte order mark.
        text = decode_utf8(_read_file(file)).removeprefix("\ufeff")
        if "\0" in text:
            raise ValueError("isn't a CSV: it holds zero bytes")
        with _read_long_fields():
            return _parse_rows(text, columns)


def make_locate(file: Path, rows: np.ndarray) -> Callable[[int], str]:
    """Return a function that returns the place of a sample, such as "texts.csv, line 2". `rows` has
    the row of each sample, int (n,), among the rows of `read_text_columns`."""

    def locate(sample: int) -> str:
        with name_file(file):
            text = decode_utf8(_read_file(file)).removeprefix("\ufeff")
            reader = csv.DictReader(io.StringIO(text, newline=""), strict=True)
            with _read_long_fields():
                next(islice(reader, int(rows[sample]), None), None)
        return f"{file}, line {reader.line_num:,}"

    return locate


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


def _read_file(file: Path) -> bytes:
    with name_file(file):
        require_room(ROOM_PER_BYTE * file.stat().st_size, f"the text of {file.name}")
        return read_bytes(file, MAX_TEXT_BYTES)
