"""Tables in files with a JSON object on each line."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.data.json_lines import parse_objects
from pipeline.data.table import TableFormat
from pipeline.data.tables.raw_table import (
    MAX_COLUMNS,
    KindOf,
    RawColumn,
    RawTable,
    require_finite,
)
from pipeline.data.tables.table_files import (
    LineError,
    convert_column,
    make_encoding_error,
    open_text,
    read_lines,
)

_ROOM_PER_BYTE = 24
"""Bytes of memory for each byte of a file, for its values as texts."""


def read_json_lines(path: Path, form: TableFormat, kind_of: KindOf) -> RawTable:
    """Read a file with a JSON object on each line. A name that an object lacks is a missing value,
    as null is. Raises OSError, and ValueError with the line of another object."""
    require_room(_ROOM_PER_BYTE * path.stat().st_size, "its table")
    numbers: list[int] = []
    fields: dict[str, list[str]] = {}
    try:
        with open_text(path, form) as file:
            for number, document in parse_objects(read_lines(file)):
                for name, value in document.items():
                    if len(fields) >= MAX_COLUMNS and name not in fields:
                        raise ValueError(f"has more than {MAX_COLUMNS:,} columns")
                    values = fields.setdefault(name, [])
                    values += [""] * (len(numbers) - len(values))
                    values.append(_format_json(number, name, value))
                numbers.append(number)
    except LineError as error:
        raise ValueError(str(error)) from error
    except UnicodeError as error:
        raise make_encoding_error(error, numbers[-1] if numbers else 0, form) from error
    if not numbers:
        raise ValueError("has no rows")

    def locate(row: int) -> str:
        return f"line {numbers[row]:,}"

    points = form.model_copy(update={"decimal": "."})
    columns: dict[str, RawColumn] = {}
    for name, values in fields.items():
        if (kind := kind_of(name)) != "ignore":
            values += [""] * (len(numbers) - len(values))
            texts = pa.chunked_array([pa.array(values, pa.large_string())])
            column = convert_column(texts, kind, points)
            if isinstance(column, np.ndarray):
                require_finite(name, column, locate)
            columns[name] = column
    return RawTable(columns, tuple(fields), len(numbers), locate)


def _format_json(line: int, name: str, value: Any) -> str:
    """Return a value as a CSV has it. Raises ValueError for a list or an object."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        raise ValueError(
            f"line {line:,}: {show_name(name)} is {kind}; must be a number, a text, true, false or "
            "null"
        )
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value)
