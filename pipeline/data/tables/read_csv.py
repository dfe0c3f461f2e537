"""CSV files: read in chunks by Python's own reader, columns as numbers or as texts."""

from __future__ import annotations

import csv
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, islice
from math import nan
from operator import itemgetter
from pathlib import Path
from typing import IO

import numpy as np

from pipeline.core.files.error_text import shown
from pipeline.core.files.unpacked_file import open_unpacked
from pipeline.core.host.memory import require_room
from pipeline.data.table import TableFormat
from pipeline.data.tables.raw_table import (
    MAX_COLUMNS,
    KindOf,
    Numbers,
    RawTable,
    Texts,
    require_finite,
)

CHUNK = 1 << 15
"""Rows that are converted together, of wide tables fewer."""
CHUNK_VALUES = 1 << 22
MAX_LINE = 1 << 24
"""Characters of the longest line that is read."""
DELIMITERS = ",;\t|"
SNIFFED_LINES = 20
_BYTES_A_VALUE = 8


def read_csv(path: Path, form: TableFormat, kind_of: KindOf) -> RawTable:
    """Read a CSV file. Blank lines are no rows.

    A column is read as numbers where `kind_of` its name says numeric, or auto and every value that
    is not missing is a number; as texts where it says category or auto. Raises OSError, and
    ValueError that gives the line and what is wrong with it.
    """
    if not path.is_file():
        raise ValueError("is no regular file" if path.exists() else "there is no such file")
    require_room(path.stat().st_size, "its table")

    def place(row: int) -> str:
        return f"line {_line_of(path, form, row):,}"

    texts: set[str] = set()
    while True:
        columns = _read(path, form, kind_of, texts, place)
        # A column whose first numbers were followed by texts is read again, as texts from the top.
        mixed = {column.name for column in columns if column.is_mixed}
        if not mixed:
            break
        texts |= mixed
    rows = columns[0].rows if columns else 0
    read = {column.name: column.read() for column in columns if column.kind != "ignore"}
    for name, values in read.items():
        if isinstance(values, Numbers):
            require_finite(name, values.values, place)
    return RawTable(read, tuple(column.name for column in columns), rows, place)


class _Column:
    """A column while it is read, chunk by chunk."""

    def __init__(self, name: str, kind: str, form: TableFormat, as_texts: bool) -> None:
        self.name, self.kind = name, kind
        self.rows = 0
        self._as_texts = as_texts or kind in ("category", "date")
        self._missing = frozenset(("", *form.missing_values))
        numbers = [value for value in map(_number, self._missing) if value is not None]
        self._missing_numbers = np.array(numbers, np.float64)
        self._comma = form.decimal == ","
        self._numbers: list[np.ndarray] = []
        self._codes: list[np.ndarray] = []
        self._texts: dict[str, int] = {}

    @property
    def is_mixed(self) -> bool:
        """Whether some chunks were numbers and others were not."""
        return bool(self._numbers and self._codes)

    def add(self, values: Sequence[str]) -> None:
        """Add the next values."""
        self.rows += len(values)
        if self.kind == "ignore":
            return
        if not self._as_texts:
            numbers = self._as_numbers(values)
            if numbers is not None:
                self._numbers.append(numbers)
                return
            self._as_texts = True
        number_of = self._texts
        codes = (number_of.setdefault(value, len(number_of)) for value in values)
        self._codes.append(np.fromiter(codes, np.int32, len(values)))

    def read(self) -> Numbers | Texts:
        """The whole column; texts without the white space around them."""
        if not self._codes:
            return Numbers(np.concatenate(self._numbers) if self._numbers else np.zeros(0))
        names: dict[str, int] = {}
        merged = np.full(len(self._texts) + 1, -1, np.int32)
        for text, code in self._texts.items():
            if (bare := text.strip()) not in self._missing:
                merged[code] = names.setdefault(bare, len(names))
        return Texts(merged[np.concatenate(self._codes)], tuple(names))

    def _as_numbers(self, values: Sequence[str]) -> np.ndarray | None:
        """The values as numbers, NaN where one is missing; None where one is neither."""
        if self._comma:
            if any("." in value and value.strip() not in self._missing for value in values):
                # A point between thousands would be read as one before decimals.
                return None
            values = [value.replace(",", ".") for value in values]
        try:
            numbers = np.fromiter(map(float, values), np.float64, len(values))
        except ValueError:
            missing = self._missing
            bare = (value.strip() for value in values)
            try:
                read = (nan if value in missing else float(value) for value in bare)
                numbers = np.fromiter(read, np.float64, len(values))
            except ValueError:
                return None
        # Python takes 1_000 for a number.
        if "_" in "".join(values):
            return None
        if self._missing_numbers.size:
            numbers[np.isin(numbers, self._missing_numbers)] = nan
        return numbers


def _number(text: str) -> float | None:
    try:
        value = float(text)
    except ValueError:
        return None
    return None if value != value else value


@dataclass(frozen=True)
class _Rows:
    """The rows of an open file, and the line that the last one ended in."""

    names: tuple[str, ...]
    rows: Iterator[list[str]]
    line: Callable[[], int]


@contextmanager
def _opened(path: Path, form: TableFormat) -> Iterator[_Rows]:
    """The names and rows of a file. Raises ValueError for what is no CSV."""
    last = 0

    def line() -> int:
        return last

    def counted(lines: Iterator[str]) -> Iterator[str]:
        nonlocal last
        for last, text in enumerate(lines, start=1):  # noqa: B007
            yield text

    try:
        with _opened_text(path, form) as file:
            delimiter = form.delimiter or _delimiter(_lines(file))
        with _opened_text(path, form) as file:
            reader = _split(counted(_lines(file)), delimiter)
            rows: Iterator[list[str]] = filter(None, reader)
            first = next(rows, None)
            if first is None:
                raise ValueError("has no rows")
            if form.header:
                names = _names(first)
            else:
                names, rows = _numbered(first), _after([first], rows)
            yield _Rows(names, rows, line)
    except csv.Error as error:
        raise ValueError(f"line {max(1, last):,}: {error}") from error
    except UnicodeError as error:
        byte = ""
        if isinstance(error, UnicodeDecodeError):
            byte = f" has the byte 0x{error.object[error.start]:02x} and"
        where = f"after line {last:,}" if last else "among its first lines"
        raise ValueError(
            f"{where}{byte} is not {form.encoding}; give dataset.encoding, such as "
            "latin-1 or utf-16"
        ) from error


def _after(first: list[list[str]], rest: Iterator[list[str]]) -> Iterator[list[str]]:
    yield from first
    yield from rest


def _encoding(form: TableFormat) -> str:
    # A mark that Windows writes in front is none of the first name's characters.
    return "utf-8-sig" if form.encoding.lower() in ("utf-8", "utf8") else form.encoding


def _lines(file: IO[str]) -> Iterator[str]:
    """The lines of a file. Raises csv.Error for what no CSV has."""
    while line := file.readline(MAX_LINE):
        if "\0" in line:
            raise csv.Error("has a NUL character; it is no CSV, or is in another encoding")
        if len(line) == MAX_LINE:
            raise csv.Error(f"has more than {MAX_LINE:,} characters")
        yield line


@contextmanager
def _opened_text(path: Path, form: TableFormat) -> Iterator[IO[str]]:
    with open_unpacked(path) as file:
        yield TextIOWrapper(file, encoding=_encoding(form), newline="")


def _split(lines: Iterator[str], delimiter: str) -> Iterator[list[str]]:
    """The fields of each line."""
    if delimiter != " ":
        return csv.reader(lines, delimiter=delimiter, strict=True)
    # Spaces before a field are skipped; those at the end would be one more field.
    bare = (f"{line.rstrip()}\n" for line in lines)
    return csv.reader(bare, delimiter=" ", skipinitialspace=True, strict=True)


def _delimiter(lines: Iterator[str]) -> str:
    """The delimiter of which the first line has most, else spaces if all lines have as many fields
    between them, several."""
    first = next(lines, "")
    if not any(delimiter in first for delimiter in DELIMITERS):
        rows = _split(chain([first], lines), " ")
        fields = set()
        # What is wrong with a line is reported when it is read again, with its number.
        with suppress(csv.Error, UnicodeError):
            fields = {len(row) for row in islice(rows, SNIFFED_LINES) if row}
        return " " if len(fields) == 1 and max(fields) > 1 else ","
    return max(DELIMITERS, key=lambda delimiter: (first.count(delimiter), delimiter == ","))


def _names(header: list[str]) -> tuple[str, ...]:
    """The names of the columns; the empty text for one without."""
    names = tuple(text.strip() for text in header)
    doubled = [name for name, count in Counter(names).items() if name and count > 1]
    if doubled:
        raise ValueError(f"has the column {', '.join(map(shown, doubled[:5]))} more than once")
    return names


def _numbered(first: list[str]) -> tuple[str, ...]:
    return tuple(f"column {n}" for n in range(1, len(first) + 1))


def _read(
    path: Path,
    form: TableFormat,
    kind_of: KindOf,
    as_texts: Collection[str],
    place: Callable[[int], str],
) -> list[_Column]:
    with _opened(path, form) as opened:
        if len(opened.names) > MAX_COLUMNS:
            raise ValueError(f"has more than {MAX_COLUMNS:,} columns")
        # An index that was written without a name tells the order of the rows, and is not read.
        kinds = [kind_of(name) if name else "ignore" for name in opened.names]
        columns = [
            _Column(name, kind, form, name in as_texts)
            for name, kind in zip(opened.names, kinds, strict=True)
        ]
        kept = sum(column.kind != "ignore" for column in columns)
        done = 0
        while rows := list(islice(opened.rows, max(1, min(CHUNK, CHUNK_VALUES // len(columns))))):
            if any(len(row) != len(columns) for row in rows):
                _refuse_fields(done, rows, len(columns), place)
            require_room(_BYTES_A_VALUE * kept * len(rows), "its table")
            for number, column in enumerate(columns):
                column.add(list(map(itemgetter(number), rows)))
            done += len(rows)
    return columns


def _refuse_fields(
    done: int, rows: Sequence[Sequence[str]], wanted: int, place: Callable[[int], str]
) -> None:
    """Raise ValueError for the first row that has more or fewer fields than there are columns."""
    for number, row in enumerate(rows):
        if len(row) != wanted:
            raise ValueError(
                f"{place(done + number)}: has {len(row)} fields, and there are {wanted} columns; "
                "quote a field that has the delimiter in it"
            )


def _line_of(path: Path, form: TableFormat, row: int) -> int:
    """The line of the file that a row, counted from 0, ends in."""
    with _opened(path, form) as opened:
        next(islice(opened.rows, row, None), None)
        return opened.line()
