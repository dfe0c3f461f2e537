"""Parquet files, by pyarrow, which is an extra of the package."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np

from pipeline.data.tables.raw_table import KindOf, Numbers, RawTable, Texts, require_finite
from pipeline.errors import DataError
from pipeline.files.error_text import shown
from pipeline.host.memory import require_room

_BYTES_A_VALUE = 8


def read_parquet(path: Path, kind_of: KindOf) -> RawTable:
    """Read a Parquet file: numbers as float64, texts, truth values and dictionaries as texts.

    Raises OSError, ValueError that says what is wrong with the file, and DataError without pyarrow.
    """
    if not path.is_file():
        raise ValueError("is no regular file" if path.exists() else "there is no such file")
    try:
        import pyarrow as pa
        import pyarrow.parquet as pq
    except ImportError as error:
        raise DataError(
            f"{path}: Parquet needs pyarrow; pip install 'recipe-pipeline[parquet]'"
        ) from error

    def place(row: int) -> str:
        return f"row {row + 1:,}"

    try:
        with pq.ParquetFile(path) as file:
            names = file.schema_arrow.names
            wanted = [name for name in names if kind_of(name) != "ignore"]
            rows = file.metadata.num_rows
            require_room(_BYTES_A_VALUE * len(wanted) * rows, "its table")
            read = file.read(columns=wanted)
    except pa.ArrowException as error:
        raise ValueError(f"can't be read as Parquet: {str(error).splitlines()[0]}") from error
    doubled = sorted({name for name in wanted if wanted.count(name) > 1})
    if doubled:
        raise ValueError(f"has the column {', '.join(map(shown, doubled[:5]))} more than once")
    columns = {name: _column(name, read.column(name), kind_of(name)) for name in wanted}
    for name, values in columns.items():
        if isinstance(values, Numbers):
            require_finite(name, values.values, place)
    return RawTable(columns, tuple(names), rows, place)


def _column(name: str, values: Any, kind: str) -> Numbers | Texts:
    """A column. Raises ValueError for values that are neither numbers nor texts."""
    import pyarrow as pa

    of = values.type
    is_number = pa.types.is_integer(of) or pa.types.is_floating(of) or pa.types.is_decimal(of)
    if is_number and kind not in ("category", "date"):
        numbers = values.cast(pa.float64(), safe=False).to_numpy()
        return Numbers(np.asarray(numbers, np.float64))
    if pa.types.is_dictionary(of):
        values = values.cast(of.value_type)
    try:
        combined = values.cast(pa.string()).combine_chunks().dictionary_encode()
    except pa.ArrowException:
        raise ValueError(f"{shown(name)} is {of}; must be numbers or texts") from None
    encoded = combined.combine_chunks() if isinstance(combined, pa.ChunkedArray) else combined
    codes = encoded.indices.fill_null(-1).to_numpy(zero_copy_only=False).astype(np.int32)
    return Texts(codes, tuple(encoded.dictionary.to_pylist()))
