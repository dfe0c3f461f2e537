"""The files from which a trained network reads new series, without labels."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.registry import Seq, Spec
from pipeline.data.columns import ColumnSpec
from pipeline.data.file_errors import name_file
from pipeline.data.series.series_columns import read_times
from pipeline.data.series.series_files import SUFFIXES, LongForm, read_series, stack_series
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables.fit_table import read_table

if TYPE_CHECKING:
    from pipeline.data.dataset_spec import DatasetSpec
    from pipeline.data.series.series_columns import ScaleSeries

KINDS: dict[str, Literal["labelled", "forecast"]] = {"series": "labelled", "forecast": "forecast"}
"""Kinds of files by the name of the dataset."""


class SeriesFormat(Spec):
    """The columns of a table of series.

    Of labelled series a file has one or several, as for training; its labels are ignored. Of a
    forecast, it has the rows before those to predict, of which a network reads the last.
    """

    kind: Literal["labelled", "forecast"]
    time_column: str
    value_columns: Seq[str] | None
    """The channels in order; null: all other columns."""
    date_format: str | None
    series_column: str = ""
    label_column: str = ""
    is_cut: bool = False
    """Whether longer series lose their end and shorter ones are padded."""

    @property
    def suffixes(self) -> tuple[str, ...]:
        """The ends of names of its files, besides arrays' ones."""
        tables = tuple(suffix for suffix in SUFFIXES if suffix not in (".npz", ".ts"))
        return (".ts", *tables) if self.kind == "labelled" else tables

    def reads(self, path: Path) -> bool:
        """Return whether a file has such a name."""
        return path.name.lower().endswith(self.suffixes)

    def read(self, path: Path, spec: ColumnSpec, scale: ScaleSeries | None) -> np.ndarray:
        """Return the series of a file, float32 (n, steps, channels) of the size `spec`.

        Raises DataError with the file and the line, and for another size.
        """
        values = self._read_last_rows(path, spec) if self.kind == "forecast" else None
        if values is None:
            form = LongForm(
                self.series_column,
                self.time_column,
                self.label_column,
                self.value_columns,
                self.date_format,
                needs_labels=False,
            )
            raw = read_series(path, form)
            (values,) = stack_series({path: raw}, spec.shape[0] if self.is_cut else None)
        if values.shape[1:] != spec.shape:
            sizes = [" steps x ".join(map(str, shape)) for shape in (values.shape[1:], spec.shape)]
            raise DataError(f"{path}: has {sizes[0]} channels; the network reads {sizes[1]}")
        is_padding = np.isnan(values)
        if is_padding.any() and scale is None:
            raise DataError(
                f"{path}: has series of less than {spec.shape[0]:,} steps; must be padded, since "
                "the run has no means of channels"
            )
        filled = values if scale is None else np.where(is_padding, np.array(scale.mean), values)
        return filled.astype(np.float32)

    def _read_last_rows(self, path: Path, spec: ColumnSpec) -> np.ndarray:
        """Return the last rows of a table, float64 (1, steps, channels)."""

        def find_kind(name: str) -> Kind:
            if name == self.time_column:
                return "category"
            is_read = self.value_columns is None or name in self.value_columns
            return "numeric" if is_read else "ignore"

        table = read_table(path, TableFormat(), find_kind)
        with name_file(path):
            times = read_times(table, self.time_column, self.date_format)
            times.require_even_steps(np.arange(table.rows))
            names = self.value_columns or tuple(
                name for name in table.columns if name != self.time_column
            )
            if not names:
                raise ValueError(f"has no columns of values besides {self.time_column}")
            numbers = [table.get_numbers(name) for name in names]
            steps = spec.shape[0]
            if table.rows < steps:
                raise ValueError(f"has {table.rows:,} rows; the network reads the last {steps:,}")
            values = np.stack(numbers, axis=1)[-steps:]
            if np.isnan(values).any():
                row, column = np.argwhere(np.isnan(values))[0].tolist()
                place = table.locate(table.rows - steps + row)
                raise ValueError(f"{place}: {names[column]} is missing; fill it before")
        return values[None]


def describe_series(dataset: DatasetSpec) -> SeriesFormat | None:
    """Return the format of a dataset's series; None for other datasets."""
    if dataset.name not in KINDS:
        return None
    keys = {"time_column", "value_columns", "date_format", "series_column", "label_column"}
    fields = dataset.model_dump(include=keys)
    is_cut = getattr(dataset, "length", None) is not None
    return SeriesFormat(kind=KINDS[dataset.name], is_cut=is_cut, **fields)
