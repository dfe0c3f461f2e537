"""Files of labelled series: .ts, .npz, and tables with a row for each step."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.core.files.name_text import show_name
from pipeline.core.files.npy import open_archive
from pipeline.data.file_errors import SIZED_BY_FILE, name_file
from pipeline.data.series.raw_series import RawSeries, require_series
from pipeline.data.series.regular_times import read_times
from pipeline.data.series.ts_file import read_ts
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables.fit_table import PARQUET, read_table
from pipeline.data.tables.raw_table import RawTable, Texts

SUFFIXES = (".ts", ".npz", ".csv", ".csv.gz", *PARQUET)
ARRAYS = ("series", "label")


@dataclass(frozen=True)
class LongForm:
    """The columns of a table with a row for each step of each series."""

    series: str
    """Name of the column of the names of series."""
    time: str
    label: str
    values: tuple[str, ...] | None
    """Names of the columns of the channels; None: all other columns."""
    date_format: str | None
    """The format of dates for `datetime.strptime`; None: inferred."""
    needs_labels: bool = True
    """Whether series without a label are refused. Without, labels are ignored and empty."""


def read_series(path: Path, form: LongForm) -> RawSeries:
    """Read a file of labelled series. Raises DataError with the file, and the line or series."""
    with name_file(path, SIZED_BY_FILE):
        if not path.is_file():
            raise ValueError("isn't a regular file" if path.exists() else "there is no such file")
        if path.suffix.lower() == ".ts":
            return read_ts(path, needs_labels=form.needs_labels)
        if path.suffix.lower() == ".npz":
            return _read_npz(path)
        if not path.name.lower().endswith(SUFFIXES):
            raise ValueError(f"must end in one of {', '.join(SUFFIXES)}")
    names = (form.series, form.time, form.label)

    def find_kind(name: str) -> Kind:
        if name in names:
            return "category"
        return "numeric" if form.values is None or name in form.values else "ignore"

    table = read_table(path, TableFormat(), find_kind)
    with name_file(path):
        return _split_rows(table, form)


def _read_npz(path: Path) -> RawSeries:
    """Read `series`, (n, steps) or (n, steps, channels), and `label`, (n,)."""
    with open_archive(path) as archive:
        missing = [name for name in ARRAYS if name not in archive.names]
        if missing:
            listed = ", ".join(map(show_name, archive.names[:10])) or "nothing"
            raise ValueError(f"lacks {', '.join(missing)}; it has {listed}")
        series, labels = (archive.read(name) for name in ARRAYS)
    if series.dtype.kind not in "fiu" or series.ndim not in (2, 3):
        raise ValueError(
            f"series is {series.dtype} of shape {series.shape}; must be numbers (n, steps) or (n, "
            "steps, channels)"
        )
    if labels.dtype.kind not in "fiubU" or labels.shape != series.shape[:1]:
        raise ValueError(
            f"label is {labels.dtype} of shape {labels.shape}; must be numbers or texts "
            f"({len(series)},)"
        )
    values = series[..., None] if series.ndim == 2 else series
    places = tuple(f"series {row}" for row in range(len(values)))
    texts = tuple(map(str, labels.tolist()))
    return require_series(RawSeries(tuple(values.astype(np.float64)), texts, places))


def _split_rows(table: RawTable, form: LongForm) -> RawSeries:
    """Return the series of a table in the order of their first rows. Raises ValueError with the
    line for times that aren't regular, and for series with several labels."""
    names = _get_texts(table, form.series)
    labels = _get_texts(table, form.label) if form.needs_labels else None
    times = read_times(table, form.time, form.date_format)
    known = (form.series, form.time, form.label)
    columns = form.values or tuple(name for name in table.columns if name not in known)
    if not columns:
        raise ValueError("has no columns of values beside the series, its time and its label")
    numbers = np.stack([table.get_numbers(name) for name in columns], axis=1)
    if np.isnan(numbers).any():
        row, column = np.argwhere(np.isnan(numbers))[0].tolist()
        raise ValueError(
            f"{table.locate(row)}: {show_name(columns[column])} is missing; fill it before"
        )
    # A stable order by series leaves the rows of each in the order of the file.
    order = np.argsort(names.codes, kind="stable")
    groups = np.split(order, np.flatnonzero(np.diff(names.codes[order])) + 1)
    values, texts, places = [], [], []
    for rows in sorted(groups, key=lambda rows: int(rows[0])):
        times.require_even_steps(rows)
        values.append(numbers[rows])
        places.append(f"series {show_name(names.texts[names.codes[rows[0]]])}")
        if labels is None:
            texts.append("")
            continue
        codes = labels.codes[rows]
        if (codes != codes[0]).any():
            row = int(rows[np.flatnonzero(codes != codes[0])[0]])
            raise ValueError(
                f"{table.locate(row)}: {show_name(form.label)} = "
                f"{show_name(labels.texts[labels.codes[row]])}, and the rows of this series before "
                f"it have {show_name(labels.texts[codes[0]])}; a series has one label"
            )
        texts.append(labels.texts[codes[0]])
    return require_series(RawSeries(tuple(values), tuple(texts), tuple(places)))


def _get_texts(table: RawTable, name: str) -> Texts:
    """Return a column of texts. Raises ValueError with the line of a missing text."""
    column = table.get_column(name)
    assert isinstance(column, Texts), "the column is read as texts"
    if (column.codes < 0).any():
        row = int(np.flatnonzero(column.codes < 0)[0])
        raise ValueError(f"{table.locate(row)}: {show_name(name)} is missing")
    return column
