"""Parquet files, read by pyarrow in a child process with limited memory and time. A hostile file of
1 kB can claim a billion rows, or unpack to gigabytes."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path

import numpy as np

from pipeline.core.host.limited_process import ChildLimitError, ChildLimits, LimitedProcess
from pipeline.core.host.memory import require_room
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
