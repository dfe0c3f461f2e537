"""Functions that fit a table on its training rows, and encode rows."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.files.error_text import show_name
from pipeline.data.file_errors import SIZED_BY_FILE, name_file
from pipeline.data.table import DateColumn, FittedTable, TableColumn, TableFormat
from pipeline.data.tables.dates import (
    compute_part_values,
    find_date_formats,
    format_example_date,
    list_date_parts,
    parse_days,
)
from pipeline.data.tables.raw_table import (
    KindOf,
    Numbers,
    RawTable,
    Texts,
    describe_missing_column,
    require_numbers,
)
from pipeline.data.tables.read_parquet import read_parquet
from pipeline.data.tables.table_targets import require_one_type

PARQUET = (".parquet", ".pq")
MAX_SAVED_BYTES = 4 << 20
"""The most bytes of a table as JSON, so that the summary of the run stays readable."""
MISSING = ""
"""The category of a missing value."""
FEWEST_ROWS = 20
"""The fewest rows for a note on row numbers. In small tables values may differ by chance."""


@dataclass(frozen=True)
class FitOptions:
    """Settings of a recipe for the columns."""

    kind_of: KindOf
    standardise: bool
    indicators: bool
    max_categories: int
    date_format: str | None = None
    """The format of dates; None: inferred."""


def read_table(path: Path, form: TableFormat, kind_of: KindOf) -> RawTable:
    """Read a Parquet file, or with a suffix that isn't in `PARQUET` a CSV file. Raises DataError
    that names the file."""
    with name_file(path, SIZED_BY_FILE):
        if not path.is_file():
            raise ValueError("isn't a regular file" if path.exists() else "there is no such file")
        if path.suffix.lower() in PARQUET:
            return read_parquet(path, kind_of)
        # Few runs read tables, and importing pyarrow takes a while.
        from pipeline.data.tables.read_csv import read_csv

        return read_csv(path, form, kind_of)


def fit_table(
    raw: RawTable, names: Sequence[str], rows: np.ndarray, form: TableFormat, options: FitOptions
) -> FittedTable:
    """Fit columns on training rows. Raises ValueError for wrong values, and if all are empty."""
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
    """Encode rows, float32 (rows, width). Raises ValueError with the row of a wrong value."""
    encoded = np.empty((raw.rows, table.width), np.float32)
    next_indicator = len(table.numeric)
    formats = {column.name: column.date.format for column in table.numeric if column.date}
    days = {
        name: _parse_date_column(raw, name, date_format) for name, date_format in formats.items()
    }
    for position, column in enumerate(table.numeric):
        if column.date is None:
            values = require_numbers(column.name, raw.get_column(column.name), raw.locate).values
        else:
            values = compute_part_values(days[column.name], column.date)
        is_missing = np.isnan(values)
        scaled = np.where(is_missing, column.mean, values)
        with np.errstate(over="ignore"):
            if column.standardised:
                scaled = (scaled - column.mean) / column.std
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
        text_numbers = {text: number for number, text in enumerate(column.categories, start=1)}
        numbers = [text_numbers.get(text, 0) for text in (*texts.texts, MISSING)]
        encoded[:, position] = np.array(numbers, np.float32)[texts.codes]
    return encoded


def read_encoded_rows(path: Path, table: FittedTable) -> np.ndarray:
    """Read another file with the columns of a table, and encode its rows, float32 (rows, width).
    Other columns aren't read. Raises DataError that names the file and the problem."""
    kinds = table.kinds
    raw = read_table(path, table.format, lambda name: kinds.get(name, "ignore"))
    with name_file(path):
        for name in kinds:
            if name not in raw.columns:
                raise ValueError(describe_missing_column(name, raw.names))
        if not raw.rows:
            raise ValueError("has no rows")
        return encode_rows(table, raw)


def to_texts(column: Numbers | Texts) -> Texts:
    """Convert a column to texts, since a Parquet file may have numbers as categories."""
    if isinstance(column, Texts):
        return column
    values, codes = np.unique(column.values, return_inverse=True)
    codes = np.where(np.isnan(column.values), -1, codes).astype(np.int32)
    return Texts(codes, tuple(f"{value:.15g}" for value in values))


def _fit_column(
    raw: RawTable, name: str, rows: np.ndarray, options: FitOptions
) -> tuple[TableColumn, ...]:
    """Fit a column on the training rows: return a column for each part of dates, else one column;
    () if it is empty."""
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
    return _fit_numbers(name, require_numbers(name, column, raw.locate).values[rows], options)


def _fit_numbers(
    name: str, numbers: np.ndarray, options: FitOptions, date: DateColumn | None = None
) -> tuple[TableColumn, ...]:
    """Fit a column of numbers, or a part of dates; return () if it has no number."""
    present = numbers[~np.isnan(numbers)]
    if not present.size:
        return ()
    # Sines and cosines need no scaling, and a date has one indicator.
    is_wave = date is not None and date.part != "days"
    column = TableColumn(
        name=name,
        kind="numeric",
        mean=float(present.mean()),
        # A constant column becomes 0.
        std=float(present.std()) or 1.0,
        standardised=options.standardise and not is_wave,
        indicator=options.indicators and present.size < numbers.size and not is_wave,
        date=date,
    )
    return (column,)


def _find_date_format(
    raw: RawTable, name: str, rows: np.ndarray, options: FitOptions
) -> str | None:
    """Return the format of all dates in the training rows; None if the column doesn't have dates.
    Raises ValueError for a column of `dates` with several formats or other values."""
    column = to_texts(raw.get_column(name))
    must_be = options.kind_of(name) == "date"
    texts = [
        text for text, count in zip(column.texts, column.count_rows(rows), strict=True) if count
    ]
    if options.date_format is not None:
        is_date = must_be or (texts and not np.isnan(parse_days(texts, options.date_format)).any())
        return options.date_format if is_date else None
    formats = find_date_formats(texts)
    if len(formats) == 1:
        return formats[0]
    if must_be and texts:
        problem = f"fit the formats {' and '.join(formats)}" if formats else "have several formats"
        raise ValueError(
            f"{show_name(name)} = {texts[0]!r:.60}: must be dates, but the values {problem}; "
            "set dataset.date_format, such as %d/%m/%Y"
        )
    return None


def _parse_date_column(raw: RawTable, name: str, date_format: str) -> np.ndarray:
    """Return dates as days since 1970, float64 (rows,), NaN if missing. Raises ValueError with the
    first row of another text."""
    column = to_texts(raw.get_column(name))
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
    """Fit a column of categories; return () if it has no value."""
    counts = column.count_rows(rows)
    frequencies = {text: int(n) for text, n in zip(column.texts, counts, strict=True) if n}
    if not frequencies:
        return ()
    ranked = sorted(frequencies, key=lambda text: (-frequencies[text], text))
    frequent = ranked[: options.max_categories]
    missing = [MISSING] if (column.codes[rows] < 0).any() else []
    return (TableColumn(name=name, kind="category", categories=(*missing, *sorted(frequent))),)


def describe_columns(
    raw: RawTable, rows: np.ndarray, table: FittedTable, kind_of: KindOf
) -> tuple[str, ...]:
    """Return lines for the log about columns of row numbers, too many categories and ambiguous
    dates. `rows` are the training rows."""
    return tuple(
        f"column {show_name(column.name)}: {note}"
        for column in table.columns
        if column.date is None
        for note in _describe_column(
            raw.get_column(column.name), rows, column, kind_of(column.name) == "auto"
        )
    )


def _describe_column(
    values: Numbers | Texts, rows: np.ndarray, column: TableColumn, is_inferred: bool
) -> Iterator[str]:
    """Yield notes on a column, about row numbers and dates only if its kind is inferred."""
    name = show_name(column.name)
    if is_inferred and _has_row_numbers(values):
        yield (
            "every value differs, as a row's number does; leave it out by "
            f"dataset.ignored=[{name}] if it is one"
        )
    if column.kind == "numeric" or isinstance(values, Numbers):
        return
    counts = values.count_rows(rows)
    count = np.count_nonzero(counts)
    encoded = sum(map(bool, column.categories))
    if encoded < count:
        categories = set(column.categories)
        missed = [n for text, n in zip(values.texts, counts, strict=True) if text not in categories]
        yield (
            f"the {encoded:,} most frequent of {count:,} categories are encoded, others count as "
            f"unknown ({sum(missed):,} training rows); dataset.max_categories sets how many"
        )
    formats = find_date_formats(values.texts) if is_inferred else []
    if len(formats) > 1:
        yield (
            f"{show_name(values.texts[0])} is a date of the formats {' and '.join(formats)}, so it "
            f"is read as a category; dataset.date_format={formats[0]!r} reads it as a date"
        )


def _has_row_numbers(values: Numbers | Texts) -> bool:
    """Return whether all values differ, and are texts or consecutive whole numbers."""
    if isinstance(values, Texts):
        return len(values.texts) == len(values.codes) >= FEWEST_ROWS
    numbers = values.values
    if len(numbers) < FEWEST_ROWS or np.isnan(numbers).any():
        return False
    if numbers.max() - numbers.min() != len(numbers) - 1:
        return False
    ordered = np.sort(numbers)
    return bool((np.diff(ordered) == 1).all() and ordered[0] == np.rint(ordered[0]))
