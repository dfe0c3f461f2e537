"""Tables: read from a file by its suffix, fitted on their training rows, encoded, and described."""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa

from pipeline.core.files.name_text import show_name
from pipeline.core.files.value_text import join_first
from pipeline.core.host.memory import require_room
from pipeline.data.file_errors import SIZED_BY_FILE, name_file
from pipeline.data.json_lines import holds_json_lines, parse_objects, require_characters
from pipeline.data.table import DateColumn, FittedTable, Kind, TableColumn, TableFormat
from pipeline.data.tables.quantities import (
    compute_part_values,
    describe_quantity,
    find_date_formats,
    find_other_mark,
    format_example_date,
    list_date_parts,
    list_units,
    parse_days,
    read_quantities,
    require_units,
)
from pipeline.data.tables.raw_table import (
    MAX_COLUMNS,
    KindOf,
    RawColumn,
    RawTable,
    Texts,
    require_finite,
)
from pipeline.data.tables.table_files import (
    LineError,
    convert_column,
    make_encoding_error,
    open_text,
    read_csv,
    read_lines,
    read_parquet,
)
from pipeline.data.tables.table_targets import require_one_type

_ROOM_PER_BYTE = 24
"""Bytes of memory for each byte of a file, for its values as texts."""
_BLOCK_CHARS = 1 << 24
"""Characters of values for which memory is looked for at once."""


def read_json_lines(path: Path, form: TableFormat, kind_of: KindOf) -> RawTable:
    """Read a file with a JSON object on each line. A name that an object lacks is a missing value,
    as null is. Raises OSError, and ValueError with the line of another object."""
    require_room(_ROOM_PER_BYTE * path.stat().st_size, "its table")
    kind_of = cache(kind_of)
    numbers: list[int] = []
    fields: dict[str, list[str]] = {}
    num_chars = 0
    room_chars = path.stat().st_size
    try:
        with open_text(path, form) as file:
            for number, document in parse_objects(read_lines(file)):
                for name, value in document.items():
                    if name not in fields:
                        if len(fields) >= MAX_COLUMNS:
                            raise ValueError(f"has more than {MAX_COLUMNS:,} columns")
                        require_characters(number, "a name", name)
                    if kind_of(name) != "ignore":
                        require_characters(number, name, value)
                    values = fields.setdefault(name, [])
                    values += [""] * (len(numbers) - len(values))
                    values.append(_format_json(number, name, value, form.decimal))
                    num_chars += len(values[-1])
                numbers.append(number)
                if num_chars > room_chars:  # of a compressed file, whose size says little
                    room_chars = num_chars + _BLOCK_CHARS
                    require_room(_ROOM_PER_BYTE * _BLOCK_CHARS, "its table")
    except LineError as error:
        raise ValueError(str(error)) from error
    except UnicodeError as error:
        raise make_encoding_error(error, numbers[-1] if numbers else 0, form) from error
    if not numbers:
        raise ValueError("has no rows")

    def locate(row: int) -> str:
        return f"line {numbers[row]:,}"

    columns: dict[str, RawColumn] = {}
    for name, values in fields.items():
        if (kind := kind_of(name)) != "ignore":
            values += [""] * (len(numbers) - len(values))
            texts = pa.chunked_array([pa.array(values, pa.large_string())])
            column = convert_column(texts, kind, form)
            if isinstance(column, np.ndarray):
                require_finite(name, column, locate)
            columns[name] = column
    return RawTable(columns, tuple(fields), len(numbers), locate)


def _format_json(line: int, name: str, value: Any, decimal: str) -> str:
    """Return a value as a CSV has it, with its decimal mark. Raises ValueError for a list or an
    object."""
    if isinstance(value, list | dict):
        kind = "a list" if isinstance(value, list) else "an object"
        raise ValueError(
            f"line {line:,}: {show_name(name)} is {kind}; must be a number, a text, true, false or "
            "null"
        )
    if isinstance(value, str):
        return value
    return "" if value is None else json.dumps(value).replace(".", decimal)


PARQUET = (".parquet", ".pq")
MAX_SAVED_BYTES = 4 << 20
"""The most bytes of a table as JSON in the summary of a run."""
MISSING = ""
"""The category of a missing value."""
CLIP = 3.0
"""Bound of clipped numbers (Holzmüller et al. 2024, arXiv 2407.04491, sec. 3)."""
FEWEST_ROWS = 20
"""The fewest rows for a note on row numbers. In small tables values may differ by chance."""


@dataclass(frozen=True)
class FitOptions:
    """A recipe's settings for the columns, which `TableDataset` describes."""

    kind_of: KindOf
    standardise: bool
    indicators: bool
    max_categories: int
    robust: bool = False
    date_format: str | None = None
    """The format of dates; None: inferred."""
    identifiers: Collection[str] = ()
    """Columns of whole numbers that are categories, by name."""


def read_table(path: Path, form: TableFormat, kind_of: KindOf) -> RawTable:
    """Read a Parquet file if its suffix is in `PARQUET`, a file of JSON objects if
    `holds_json_lines`, else a CSV file. Columns of numbers with a unit are numbers.

    Raises DataError.
    """
    with name_file(path, SIZED_BY_FILE):
        if not path.is_file():
            raise ValueError("isn't a regular file" if path.exists() else "there is no such file")
        if path.suffix.lower() in PARQUET:
            table = read_parquet(path, kind_of)
        elif holds_json_lines(path):
            table = read_json_lines(path, form, kind_of)
        else:
            table = read_csv(path, form, kind_of)
        return read_quantities(table, form.decimal, kind_of)


def fit_table(
    raw: RawTable, names: Sequence[str], rows: np.ndarray, form: TableFormat, options: FitOptions
) -> FittedTable:
    """Fit the columns `names` on the training rows, int (n,). Raises ValueError for wrong values,
    and if no column has values."""
    columns = [column for name in names for column in _fit_column(raw, name, rows, options)]
    if not columns:
        raise ValueError("has no column with values besides the targets; a network needs one")
    fitted = {column.name for column in columns}
    left_out = tuple(name for name in names if name not in fitted)
    ordered = sorted(columns, key=lambda column: column.kind, reverse=True)
    table = FittedTable(columns=tuple(ordered), format=form, left_out=left_out)
    saved_bytes = len(table.model_dump_json())
    if saved_bytes > MAX_SAVED_BYTES:
        raise ValueError(
            f"has names and categories of {saved_bytes:,} bytes, and a run keeps "
            f"{MAX_SAVED_BYTES:,}; set dataset.max_categories, or add columns to dataset.ignored"
        )
    return table


def encode_rows(table: FittedTable, raw: RawTable) -> np.ndarray:
    """Encode all rows, float32 (rows, width). Raises ValueError with the row of a wrong value."""
    encoded = np.empty((raw.rows, table.width), np.float32)
    next_indicator = len(table.numeric)
    days: dict[str, np.ndarray] = {}
    for position, column in enumerate(table.numeric):
        if column.date is None:
            values = raw.get_numbers(column.name)
        else:
            if column.name not in days:
                days[column.name] = _parse_date_column(raw, column.name, column.date.format)
            values = compute_part_values(days[column.name], column.date)
        is_missing = np.isnan(values)
        scaled = np.where(is_missing, column.mean, values)
        with np.errstate(over="ignore"):
            if column.standardised:
                scaled = (scaled - column.mean) / column.std
            if column.clipped:
                scaled = scaled / np.sqrt(1 + (scaled / CLIP) ** 2)
            encoded[:, position] = scaled
        is_too_large = ~np.isfinite(encoded[:, position])
        if is_too_large.any():
            row = int(np.argmax(is_too_large))
            raise ValueError(
                f"{raw.locate(row)}: {show_name(column.name)} = {values[row]:g} is too far from "
                f"the mean {column.mean:g} of the training split, whose standard deviation is "
                f"{column.std:g}"
            )
        if column.indicator:
            encoded[:, next_indicator] = is_missing
            next_indicator += 1
    for position, column in enumerate(table.categories, start=table.num_numbers):
        texts = to_texts(raw.get_column(column.name))
        numbers = {text: number for number, text in enumerate(column.categories, start=1)}
        # The code -1 of a missing value selects the last of these, the number of `MISSING`.
        number_by_code = [numbers.get(text, 0) for text in (*texts.texts, MISSING)]
        encoded[:, position] = np.array(number_by_code, np.float32)[texts.codes]
    return encoded


def read_encoded_rows(
    path: Path, table: FittedTable, targets: Sequence[str] = ()
) -> tuple[np.ndarray, RawTable]:
    """Read the columns of a table, and of targets, from another file. Return its encoded rows,
    float32 (rows, width), and its columns. Raises DataError with the file and the problem."""
    kinds: dict[str, Kind] = {column.name: column.kind for column in table.columns}
    kinds |= {column.name: "date" for column in table.columns if column.date}
    kinds |= {column.name: "numeric" for column in table.columns if column.identifies}
    kinds |= dict.fromkeys(targets, "auto")
    raw = read_table(path, table.format, lambda name: kinds.get(name, "ignore"))
    with name_file(path, SIZED_BY_FILE):
        if not raw.rows:
            raise ValueError("has no rows")
        require_units(raw, {column.name: column.unit for column in table.numeric})
        return encode_rows(table, raw), raw


def to_texts(column: RawColumn) -> Texts:
    """Convert a column to texts. Categories in a Parquet file may be numbers."""
    if isinstance(column, Texts):
        return column
    values, codes = np.unique(column, return_inverse=True)
    codes = np.where(np.isnan(column), -1, codes).astype(np.int32)
    return Texts(codes, tuple(f"{value:.15g}" for value in values))


def _fit_column(
    raw: RawTable, name: str, rows: np.ndarray, options: FitOptions
) -> tuple[TableColumn, ...]:
    """Fit a column of a file on the training rows. Return a column, or for dates one for each part,
    or () if all values are missing."""
    column = raw.get_column(name)
    kind = options.kind_of(name)
    if kind == "date" or (kind == "auto" and isinstance(column, Texts)):
        date_format = _find_date_format(raw, name, rows, options)
        if date_format is not None:
            days = _parse_date_column(raw, name, date_format)[rows]
            if np.isnan(days).all():
                return ()
            columns: list[TableColumn] = []
            for part in list_date_parts(days):
                date = DateColumn(format=date_format, part=part, first_day=float(np.nanmin(days)))
                columns += _fit_numbers(name, compute_part_values(days, date), options, date)
            return tuple(columns)
        if kind == "date":
            return ()
    if kind == "auto" and isinstance(column, Texts):
        require_one_type(name, column, raw)
    if kind == "category" or (kind == "auto" and isinstance(column, Texts)):
        return _fit_category(name, to_texts(column), rows, options)
    if name in options.identifiers:
        categories = _fit_category(name, to_texts(column), rows, options)
        return tuple(fitted.model_copy(update={"identifies": True}) for fitted in categories)
    quantity = raw.quantities.get(name)
    fitted = _fit_numbers(name, raw.get_numbers(name)[rows], options)
    if quantity is None:
        return fitted
    return tuple(column.model_copy(update={"unit": quantity.unit}) for column in fitted)


def _fit_numbers(
    name: str, numbers: np.ndarray, options: FitOptions, date: DateColumn | None = None
) -> tuple[TableColumn, ...]:
    """Fit a column of numbers, or a part of dates. Return () if all numbers are missing."""
    present = numbers[~np.isnan(numbers)]
    if not present.size:
        return ()
    # Sines and cosines need no scaling. Of the parts of a date only the days have an indicator.
    is_wave = date is not None and date.part != "days"
    # The computed deviation of equal numbers such as 0.1 isn't always 0.
    is_constant = bool(present.min() == present.max())
    if options.robust:
        centre, spread = measure_robustly(present)
    else:
        centre, spread = float(present.mean()), float(present.std())
    column = TableColumn(
        name=name,
        kind="numeric",
        mean=float(present[0]) if is_constant else centre,
        std=1.0 if is_constant else spread or 1.0,
        clipped=options.robust and options.standardise and not is_wave,
        standardised=options.standardise and not is_wave,
        indicator=options.indicators and present.size < numbers.size and not is_wave,
        date=date,
    )
    return (column,)


def measure_robustly(numbers: np.ndarray) -> tuple[float, float]:
    """Return the median of numbers (n,), and the range between their quartiles; half the range of
    all if this is 0 (Holzmüller et al. 2024, arXiv 2407.04491, sec. 3)."""
    low, median, high = np.quantile(numbers, (0.25, 0.5, 0.75))
    return float(median), float(high - low or (numbers.max() - numbers.min()) / 2)


def _find_date_format(
    raw: RawTable, name: str, rows: np.ndarray, options: FitOptions
) -> str | None:
    """Return the format of all dates in the training rows; None if the column doesn't have dates.
    Raises ValueError if the column is listed as `dates`, but no single format fits."""
    column = to_texts(raw.get_column(name))
    is_listed = options.kind_of(name) == "date"
    counts = column.count_rows(rows)
    texts = [text for text, count in zip(column.texts, counts, strict=True) if count]
    if options.date_format is not None:
        if is_listed or (texts and not np.isnan(parse_days(texts, options.date_format)).any()):
            return options.date_format
        return None
    formats = find_date_formats(texts)
    if len(formats) == 1:
        return formats[0]
    if is_listed and texts:
        problem = "no known format fits all of them"
        if formats:
            problem = f"the values fit the formats {' and '.join(formats)}"
        raise ValueError(
            f"{show_name(name)} = {texts[0]!r:.60}: must be dates, but {problem}; "
            "set dataset.date_format, such as %d/%m/%Y"
        )
    return None


def _parse_date_column(raw: RawTable, name: str, date_format: str) -> np.ndarray:
    """Return dates as days since 1970, float64 (rows,), NaN if missing. Raises ValueError with the
    first row whose text doesn't have the format."""
    column = to_texts(raw.get_column(name))
    # The code -1 of a missing value selects the last of these, NaN.
    days = np.append(parse_days(column.texts, date_format), np.nan)[column.codes]
    wrong_rows = np.flatnonzero(np.isnan(days) & (column.codes >= 0))
    if wrong_rows.size:
        row = int(wrong_rows[0])
        text = column.texts[column.codes[row]]
        raise ValueError(
            f"{raw.locate(row)}: {show_name(name)} = {text!r:.60}: must be a date such as "
            f"{format_example_date(date_format)}, as in the training split, or missing"
        )
    return days


def _fit_category(
    name: str, column: Texts, rows: np.ndarray, options: FitOptions
) -> tuple[TableColumn, ...]:
    """Fit a column of categories. Return () if all values are missing."""
    counts = column.count_rows(rows)
    frequencies = {text: int(n) for text, n in zip(column.texts, counts, strict=True) if n}
    if not frequencies:
        return ()
    ranked = sorted(frequencies, key=lambda text: (-frequencies[text], text))
    categories = sorted(ranked[: options.max_categories])
    if (column.codes[rows] < 0).any():
        categories.insert(0, MISSING)
    return (TableColumn(name=name, kind="category", categories=tuple(categories)),)


def describe_columns(
    raw: RawTable, rows: np.ndarray, table: FittedTable, kind_of: KindOf
) -> tuple[str, ...]:
    """Return notes on quantities, and on columns as `_describe_column` does, or in several units.
    Dates have none. `rows` are the training rows."""
    notes = [describe_quantity(name, quantity) for name, quantity in raw.quantities.items()]
    for column in table.columns:
        if column.date is None:
            values = raw.get_column(column.name)
            is_inferred = kind_of(column.name) == "auto"
            column_notes = list(_describe_column(values, rows, column, is_inferred))
            units = list_units(values, table.format.decimal) if is_inferred else ()
            if len(units) > 1:
                listed = join_first([show_name(unit) or "none" for unit in units], 3)
                column_notes.append(f"has numbers in several units, {listed}, read as categories")
            mark = find_other_mark(values, table.format.decimal) if is_inferred else None
            if mark is not None:
                argument = f"""'++dataset.decimal="{mark}"'"""
                column_notes.append(
                    f"has numbers whose decimal mark is {mark!r}, read as categories; {argument} "
                    "reads them"
                )
            notes += [f"column {show_name(column.name)}: {note}" for note in column_notes]
    return tuple(notes)


def _describe_column(
    values: RawColumn, rows: np.ndarray, column: TableColumn, is_inferred: bool
) -> Iterator[str]:
    """Yield notes on too many categories, and for an inferred kind on row numbers and dates."""
    name = show_name(column.name)
    if is_inferred and _has_row_numbers(values):
        yield (
            "every value differs, as a row's number does; leave it out by "
            f"dataset.ignored=[{name}] if it is one"
        )
    if column.kind == "numeric" or isinstance(values, np.ndarray):
        return
    counts = values.count_rows(rows)
    num_categories = np.count_nonzero(counts)
    encoded = set(column.categories) - {MISSING}
    if len(encoded) < num_categories:
        rows_by_text = zip(values.texts, counts, strict=True)
        num_unknown = sum(count for text, count in rows_by_text if text not in encoded)
        yield (
            f"the {len(encoded):,} most frequent of {num_categories:,} categories are encoded, "
            f"others count as unknown ({num_unknown:,} training rows); dataset.max_categories sets "
            "how many"
        )
    formats = find_date_formats(values.texts) if is_inferred else []
    if len(formats) > 1:
        yield (
            f"{show_name(values.texts[0])} is a date of the formats {' and '.join(formats)}, so it "
            f"is read as a category; dataset.date_format={formats[0]!r} reads it as a date"
        )


def _has_row_numbers(values: RawColumn) -> bool:
    """Return whether all values differ, and are texts or consecutive whole numbers."""
    if isinstance(values, Texts):
        return len(values.texts) == len(values.codes) >= FEWEST_ROWS
    if len(values) < FEWEST_ROWS or np.isnan(values).any():
        return False
    if values.max() - values.min() != len(values) - 1:
        return False
    ordered = np.sort(values)
    return bool((np.diff(ordered) == 1).all() and ordered[0] == np.rint(ordered[0]))
