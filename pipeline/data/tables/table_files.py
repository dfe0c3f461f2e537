"""Files of tables: CSV, and Parquet, read in a child process with limited memory and time.

CSV files are split by pyarrow, or if they may be damaged by Python's stricter reader.
"""

from __future__ import annotations

import codecs
import csv
import json
import re
from array import array
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from io import TextIOWrapper
from itertools import chain, count, islice
from math import nan
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
from pyarrow import compute
from pyarrow import csv as arrow_csv

from pipeline.core.files.unpacked_file import open_unpacked
from pipeline.core.host.limited_process import ChildLimitError, ChildLimits, LimitedProcess
from pipeline.core.host.memory import require_room
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables.parquet_child import LENGTH, OPEN, READ
from pipeline.data.tables.raw_table import (
    MAX_COLUMNS,
    KindOf,
    RawColumn,
    RawTable,
    Texts,
    require_finite,
    require_unique,
)

CHUNK = 1 << 15
CHUNK_VALUES = 1 << 22
"""The most rows, and the most values, that Python's reader converts at once."""
MAX_LINE = 1 << 24
"""Characters of the shortest line that is refused."""
DELIMITERS = ",;\t|"
SNIFFED_LINES = 20
"""Number of lines that are read to decide whether fields are separated by spaces."""
_BYTES_PER_FIELD = 24
"""Memory for a field besides its text: its start, its trimmed copy and its number."""
_BYTES_A_VALUE = 8
"""Memory of a value after it is read."""
_COLUMNS_AT_ONCE = 64
"""Columns of a request to the child process. Its memory grows with their number."""
_BASE_VALUES = 10_000_000
_VALUES_PER_BYTE = 1_000
"""The most values of a file: a base, and more for each byte of the file. A file with 50 constant
columns, which take 1 bit per row, has 400 for each byte."""
_BASE_MEMORY_BYTES = 2**30
_MEMORY_PER_BYTE = 256
_MEMORY_PER_VALUE = 40
"""Address space of the child process: a base, and more per byte of the file and per value read."""
_BASE_CPU_S = 10
_BYTES_PER_CPU_S = 2_000_000
_VALUES_PER_CPU_S = 200_000
"""CPU time of the child process: a base, and the slowest speeds that are accepted."""


def read_csv(path: Path, form: TableFormat, kind_of: KindOf) -> RawTable:
    """Read a CSV file. Blank lines are skipped. A column is read as numbers if its kind is numeric
    or auto and all present values are numbers, else as texts. Raises OSError, and ValueError with
    the line for a damaged file."""
    require_room(path.stat().st_size, "its table")

    # Rows are read once, up to the last one that is located.
    lines = _number_lines(path, form)
    numbers = array("q")

    def locate(row: int) -> str:
        numbers.extend(islice(lines, max(0, row + 1 - len(numbers))))
        return f"line {numbers[row]:,}"

    with _open_rows(path, form) as opened:
        names = opened.names
        delimiter = opened.delimiter
    if len(names) > MAX_COLUMNS:
        raise ValueError(f"has more than {MAX_COLUMNS:,} columns")
    fields = _split_by_arrow(path, form, delimiter, len(names)) or _split_strictly(path, form)
    num_rows = len(fields[0])
    columns: dict[str, RawColumn] = {}
    fields.reverse()
    for name in names:
        values = fields.pop()  # The fields of a column are freed before the next is converted.
        # A column without a name is an index of rows, and isn't read.
        kind: Kind = kind_of(name) if name else "ignore"
        if kind == "ignore":
            continue
        column = convert_column(values, kind, form)
        if isinstance(column, np.ndarray):
            require_finite(name, column, locate)
        columns[name] = column
    return RawTable(columns, names, num_rows, locate)


def _number_lines(path: Path, form: TableFormat) -> Iterator[int]:
    """Yield the number of the last line of each row of a CSV file."""
    with _open_rows(path, form) as opened:
        for _ in opened.rows:
            yield opened.line()


def _split_by_arrow(
    path: Path, form: TableFormat, delimiter: str, columns: int
) -> list[pa.ChunkedArray] | None:
    """Return the fields of each column, large_string (rows,). None: the file needs a stricter
    reader, since Arrow accepts text after a closing quote, and a quote that isn't closed."""
    end = re.escape(delimiter).encode() + rb"\r\n"
    # A quoted field begins after a delimiter or line break, and ends before such a character.
    quoted = rb'(?<![^%b])"(?:[^"]++|"")*+"(?=[%b]|\Z)' % (end, end)
    try:
        # Arrow would read an empty line before the header as the header.
        text = _read_as_utf8(path, form).lstrip(b"\r\n")
        if delimiter == " " or not delimiter.isascii() or b"\0" in text:
            return None
        num_fields = text.count(delimiter.encode()) + text.count(b"\n") + 1
        require_room(len(text) + _BYTES_PER_FIELD * num_fields, "its table")
        if not re.match(rb'(?:[^"]*+%b)*+[^"]*+\Z' % quoted, text):
            return None
        table = arrow_csv.read_csv(
            pa.BufferReader(text),
            arrow_csv.ReadOptions(
                use_threads=False,
                block_size=MAX_LINE,
                autogenerate_column_names=True,
                skip_rows_after_names=int(form.header),
            ),
            arrow_csv.ParseOptions(delimiter=delimiter, newlines_in_values=True),
            arrow_csv.ConvertOptions(
                column_types={f"f{n}": pa.large_string() for n in range(columns)},
                strings_can_be_null=False,
            ),
        )
    except (pa.ArrowInvalid, UnicodeError):
        return None
    longest = [compute.max(compute.binary_length(fields)).as_py() or 0 for fields in table.columns]
    is_whole = len(longest) == columns and max(longest) <= MAX_LINE
    return list(table.columns) if is_whole else None


def _read_as_utf8(path: Path, form: TableFormat) -> bytes:
    """Return a file's text in UTF-8. Raises UnicodeError, and ValueError for too little memory."""
    pieces = []
    with open_text(path, form) as file:
        while piece := file.read(MAX_LINE):
            pieces.append(piece.encode())
            require_room(len(pieces[-1]), "its table")
    return b"".join(pieces)


def _split_strictly(path: Path, form: TableFormat) -> list[pa.ChunkedArray]:
    """Return the fields of each column, large_string (rows,), split by Python's strict reader.
    Raises ValueError with the line of a wrong row."""
    with _open_rows(path, form) as opened:
        chunk = max(1, min(CHUNK, CHUNK_VALUES // len(opened.names)))
        chunks: list[list[pa.Array]] = [[] for _ in opened.names]
        while rows := list(islice(_read_complete_rows(opened), chunk)):
            for number, column in enumerate(chunks):
                column.append(pa.array([row[number] for row in rows], pa.large_string()))
            require_room(sum(column[-1].nbytes for column in chunks), "its table")
    return [pa.chunked_array(column, pa.large_string()) for column in chunks]


def _read_complete_rows(opened: _Rows) -> Iterator[list[str]]:
    """Yield the rows. Raises ValueError for a row with a wrong number of fields."""
    for row in opened.rows:
        if len(row) != len(opened.names):
            raise ValueError(
                f"line {opened.line():,}: has {len(row)} fields for "
                f"{len(opened.names)} columns; quote a field that has the delimiter in it"
            )
        yield row


def convert_column(values: pa.ChunkedArray, kind: Kind, form: TableFormat) -> RawColumn:
    """Convert a column to numbers if its kind and values allow it, else to texts."""
    if kind in ("auto", "numeric") and (numbers := _parse_numbers(values, form)) is not None:
        return numbers
    encoded = values.combine_chunks().dictionary_encode()
    codes: dict[str, int] = {}
    # Texts that differ in spaces alone get the same code, missing ones -1.
    new_codes = np.full(len(encoded.dictionary), -1, np.int32)
    for index, text in enumerate(encoded.dictionary.to_pylist()):
        stripped = text.strip()
        if stripped and stripped not in form.missing_values:
            new_codes[index] = codes.setdefault(stripped, len(codes))
    return Texts(new_codes[encoded.indices.to_numpy()], tuple(codes))


def _parse_numbers(values: pa.ChunkedArray, form: TableFormat) -> np.ndarray | None:
    """Return numbers, float64 (rows,), NaN if missing; None if a value isn't a number."""
    missing = pa.array(["", *form.missing_values], pa.large_string())
    stripped = compute.utf8_trim_whitespace(values)
    texts = compute.if_else(compute.is_in(stripped, missing), None, stripped)
    if form.decimal == ",":
        if compute.any(compute.match_substring(texts, ".")).as_py():
            # A point between thousands would be read as a decimal point.
            return None
        texts = compute.replace_substring(texts, ",", ".")
    try:
        numbers = compute.cast(texts, pa.float64()).to_numpy()
    except pa.ArrowInvalid:
        numbers = None
    # Python accepts more numbers, such as digits of other scripts, and Arrow more texts for NaN.
    if numbers is None or np.isnan(numbers).sum() > texts.null_count:
        encoded = texts.combine_chunks().dictionary_encode()
        parsed = [nan]
        for text in encoded.dictionary.to_pylist():
            value = _parse_number(text)
            if value is None or "_" in text:
                return None
            parsed.append(value)
        # The index of a missing text is -1, so 1 is added: it selects the first of these, NaN.
        numbers = np.array(parsed)[encoded.indices.fill_null(-1).to_numpy() + 1]
    # A number that means "missing" can be written in several ways, such as -999 and -999.0.
    parsed_missing = [
        _parse_number(text.replace(form.decimal, ".")) for text in form.missing_values
    ]
    missing_numbers = [value for value in parsed_missing if value is not None]
    return np.where(np.isin(numbers, missing_numbers), nan, numbers) if missing_numbers else numbers


def _parse_number(text: str) -> float | None:
    try:
        return float(text)
    except ValueError:
        return None


class LineError(csv.Error):
    """The number of a line, and why it can't be one of a table."""


@dataclass(frozen=True)
class _Rows:
    """An open file whose rows are read one by one."""

    names: tuple[str, ...]
    delimiter: str
    rows: Iterator[list[str]]
    line: Callable[[], int]
    """Returns the number of the line in which the last row ended, from 1."""


@contextmanager
def _open_rows(path: Path, form: TableFormat) -> Iterator[_Rows]:
    """Open a file, and read its delimiter and names. Raises ValueError, also in the block, with the
    line at which the file isn't a CSV or isn't in its encoding."""
    line = 0
    try:
        with open_text(path, form) as file:
            delimiter = form.delimiter or _find_delimiter(read_lines(file))
        with open_text(path, form) as file:
            reader = _split_fields(read_lines(file), delimiter)
            try:
                rows: Iterator[list[str]] = filter(None, _read_long_fields(reader))
                first = next(rows, None)
                if first is None:
                    raise ValueError("has no rows")
                names = tuple(f"column {n}" for n in range(1, len(first) + 1))
                if form.header:
                    names = tuple(text.strip() for text in first)
                    require_unique(filter(None, names))
                else:
                    rows = chain([first], rows)
                yield _Rows(names, delimiter, rows, lambda: reader.line_num)
            finally:
                line = reader.line_num
    except LineError as error:
        raise ValueError(str(error)) from error
    except csv.Error as error:
        raise ValueError(f"line {max(1, line):,}: {error}") from error
    except UnicodeError as error:
        raise make_encoding_error(error, line, form) from error


def _read_long_fields(reader: Iterator[list[str]]) -> Iterator[list[str]]:
    """Yield the rows of a reader of the csv module, with fields of any length below `MAX_LINE`.

    The module's limit is the interpreter's, so it is back before other code runs.
    """
    while True:
        limit = csv.field_size_limit(MAX_LINE)
        try:
            row = next(reader, None)
        finally:
            csv.field_size_limit(limit)
        if row is None:
            return
        yield row


def make_encoding_error(error: UnicodeError, line: int, form: TableFormat) -> ValueError:
    """Return the error of a text in another encoding. `line` is the last line that was read."""
    byte = ""
    if isinstance(error, UnicodeDecodeError):
        byte = f" has the byte 0x{error.object[error.start]:02x}, which"
    place_text = f"text after line {line:,}" if line else "one of the first lines"
    return ValueError(
        f"{place_text}{byte} isn't {form.encoding}; set dataset.encoding, such as latin-1 or utf-16"
    )


@contextmanager
def open_text(path: Path, form: TableFormat) -> Iterator[IO[str]]:
    """Open a file of texts, which may be gzipped or the only one of a zip file."""
    # The byte order mark of Windows isn't a part of the first name.
    is_utf8 = codecs.lookup(form.encoding).name == "utf-8"
    with open_unpacked(path) as file:
        yield TextIOWrapper(file, "utf-8-sig" if is_utf8 else form.encoding, newline="")


def read_lines(file: IO[str]) -> Iterator[str]:
    """Yield the lines of a file. Raises LineError for a NUL character or too long a line."""
    for number in count(1):
        line = file.readline(MAX_LINE)
        if not line:
            return
        if "\0" in line:
            problem = "has a NUL character; it isn't a text, or has another encoding"
            raise LineError(f"line {number:,}: {problem}")
        if len(line) == MAX_LINE:
            raise LineError(f"line {number:,}: has {MAX_LINE:,} characters or more")
        yield line


def _split_fields(lines: Iterator[str], delimiter: str) -> Any:
    if delimiter != " ":
        return csv.reader(lines, delimiter=delimiter, strict=True)
    # The reader skips spaces before a field, but spaces at the end would be one more field.
    stripped = (f"{line.rstrip()}\n" for line in lines)
    return csv.reader(stripped, delimiter=" ", skipinitialspace=True, strict=True)


def _find_delimiter(lines: Iterator[str]) -> str:
    """Return the most frequent delimiter of the first line that isn't blank, outside of quotes. If
    the line has none, it is the space if it splits all lines into equal numbers of fields, else the
    comma."""
    first = next((line for line in lines if line.strip("\r\n")), "")
    unquoted = re.sub(r'"[^"]*"', "", first)
    if not any(delimiter in unquoted for delimiter in DELIMITERS):
        rows = _split_fields(chain([first], lines), " ")
        fields = set()
        # Errors are raised when the file is read again, with the number of the line.
        with suppress(csv.Error, UnicodeError):
            fields = {len(row) for row in islice(rows, SNIFFED_LINES) if row}
        return " " if len(fields) == 1 and max(fields) > 1 else ","
    return max(DELIMITERS, key=lambda delimiter: (unquoted.count(delimiter), delimiter == ","))


def read_parquet(path: Path, kind_of: KindOf) -> RawTable:
    """Read a Parquet file. Columns of numbers are read as numbers unless their kind is category or
    date, others as texts. Raises OSError, and ValueError for a damaged or too large file."""

    def locate(row: int) -> str:
        return f"row {row + 1:,}"

    size_bytes = path.stat().st_size
    process = LimitedProcess("pipeline.data.tables.parquet_child")
    request = json.dumps(str(path.resolve())).encode()
    metadata = json.loads(process.ask(OPEN, request, _compute_limits(size_bytes, 0, 0)))
    names = metadata["names"]
    rows = metadata["rows"]
    read_names = [name for name in names if kind_of(name) != "ignore"]
    _require_bounds(names, read_names, rows, size_bytes)
    columns: dict[str, RawColumn] = {}
    for start in range(0, len(read_names), _COLUMNS_AT_ONCE):
        batch_names = read_names[start : start + _COLUMNS_AT_ONCE]
        request = json.dumps(
            {name: kind_of(name) in ("category", "date") for name in batch_names}
        ).encode()
        read_count = start + len(batch_names)
        limits = _compute_limits(size_bytes, rows * len(batch_names), rows * read_count)
        try:
            answer = process.ask(READ, request, limits)
        except ChildLimitError as error:
            raise ValueError(
                f"{error} to read {len(batch_names):,} columns of {rows:,} rows from a file of "
                f"{size_bytes:,} bytes"
            ) from error
        columns |= zip(batch_names, _parse_columns(memoryview(answer)), strict=True)
    for name, values in columns.items():
        if isinstance(values, np.ndarray):
            require_finite(name, values, locate)
    return RawTable(columns, tuple(names), rows, locate)


def _compute_limits(size_bytes: int, values: int, total_values: int) -> ChildLimits:
    """Return the limits of a request for `values` values of a file of `size_bytes` bytes, after
    which `total_values` have been read."""
    return ChildLimits(
        _BASE_MEMORY_BYTES + _MEMORY_PER_BYTE * size_bytes + _MEMORY_PER_VALUE * values,
        _BASE_CPU_S + size_bytes // _BYTES_PER_CPU_S + total_values // _VALUES_PER_CPU_S,
    )


def _require_bounds(
    names: Sequence[str], read_names: Sequence[str], rows: int, size_bytes: int
) -> None:
    """Raise ValueError for too many columns or values, repeated columns, or too little memory."""
    if len(names) > MAX_COLUMNS:
        raise ValueError(f"has {len(names):,} columns; must have at most {MAX_COLUMNS:,}")
    require_unique(read_names)
    values = rows * len(read_names)
    max_values = _BASE_VALUES + _VALUES_PER_BYTE * size_bytes
    if values > max_values:
        raise ValueError(
            f"claims {rows:,} rows of {len(read_names):,} columns in {size_bytes:,} bytes; must "
            f"have at most {max_values:,} values"
        )
    require_room(_BYTES_A_VALUE * values, "its table")


def _parse_columns(answer: memoryview) -> Iterator[RawColumn]:
    """Yield the columns of an answer, which has the form of `parquet_child._encode_column`."""
    position = 0

    def read_piece() -> memoryview:
        nonlocal position
        (size_bytes,) = LENGTH.unpack_from(answer, position)
        position += LENGTH.size + size_bytes
        return answer[position - size_bytes : position]

    while position < len(answer):
        kind = answer[position : position + 1]
        position += 1
        if kind == b"n":
            yield np.frombuffer(read_piece(), np.float64)
        else:
            codes = np.frombuffer(read_piece(), np.int32)
            yield Texts(codes, tuple(json.loads(bytes(read_piece()))))
