"""Notes on the columns of a table for the user, a line each."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from pipeline.core.files.error_text import shown
from pipeline.data.table import FittedTable, TableColumn
from pipeline.data.tables.dates import find_date_formats
from pipeline.data.tables.raw_table import KindOf, Numbers, RawTable, Texts

FEWEST_ROWS = 20
"""In a smaller table values may all differ by chance."""


def column_notes(
    raw: RawTable, rows: np.ndarray, table: FittedTable, kind_of: KindOf
) -> tuple[str, ...]:
    """Lines about columns that number the rows, have too many categories, or dates of which two
    formats are true. `rows` are those of the training split."""
    return tuple(
        f"column {shown(column.name)}: {note}"
        for column in table.columns
        if column.date is None
        for note in _notes(raw.column(column.name), rows, column, kind_of(column.name) == "auto")
    )


def _notes(
    values: Numbers | Texts, rows: np.ndarray, column: TableColumn, is_found: bool
) -> Iterator[str]:
    """Notes on a column, whose type is found or set by the recipe."""
    name = shown(column.name)
    if is_found and _numbers_rows(values):
        yield (
            "every value differs, as a row's number does; leave it out by "
            f"dataset.ignored=[{name}] if it is one"
        )
    if column.kind == "numeric" or isinstance(values, Numbers):
        return
    counts = values.counts(rows)
    known, kept = np.count_nonzero(counts), sum(map(bool, column.categories))
    if kept < known:
        yield (
            f"the {kept:,} most frequent of {known:,} categories are told apart, others are not "
            f"known ({counts.sum() - _kept_rows(values, counts, column):,} training rows); "
            "dataset.max_categories sets how many"
        )
    formats = find_date_formats(values.texts) if is_found else []
    if len(formats) > 1:
        yield (
            f"{shown(values.texts[0])} is a date of the formats {' and '.join(formats)}, so it is "
            f"read as a category; dataset.date_format={formats[0]!r} reads it as a date"
        )


def _kept_rows(values: Texts, counts: np.ndarray, column: TableColumn) -> int:
    kept = set(column.categories)
    return int(sum(n for text, n in zip(values.texts, counts, strict=True) if text in kept))


def _numbers_rows(values: Numbers | Texts) -> bool:
    """Whether all values differ and are texts, or whole numbers in sequence."""
    if isinstance(values, Texts):
        return len(values.texts) == len(values.codes) >= FEWEST_ROWS
    numbers = values.values
    if len(numbers) < FEWEST_ROWS or np.isnan(numbers).any():
        return False
    if numbers.max() - numbers.min() != len(numbers) - 1:
        return False
    ordered = np.sort(numbers)
    return bool((np.diff(ordered) == 1).all() and ordered[0] == np.rint(ordered[0]))
