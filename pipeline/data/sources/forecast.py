"""Forecasts: windows of the user's series, from a table with a column of times.

Windows are split in time. They are compared with the seasonal naive forecast.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, PositiveInt, model_validator

from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.core.registry import Seq, component
from pipeline.data.columns import RawData, SampleUnit, Split
from pipeline.data.dataset_spec import LocalDatasetSpec, RequiredRoot
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share
from pipeline.data.series.package_file import PackageName, resolve_root
from pipeline.data.series.regular_times import read_times
from pipeline.data.series.scale_series import fit_scale
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.raw_table import RawTable
from pipeline.data.targets import Targets, make_number_targets

ColumnNames = Annotated[
    Seq[str],
    Field(min_length=1),
    BeforeValidator(lambda names: [names] if isinstance(names, str) else names),
]
"""A name or several names."""


@component("dataset")
class Forecast(LocalDatasetSpec):
    """Windows of a series: the column `series`, float32 (input_length, channels), of a window's
    first steps, and as labels the numbers of its last `horizon` steps.

    The file has a row for each step, in the order of time. Its last rows are evaluated. No window
    has rows of both splits, and means and deviations are of the training rows.
    """

    content: ClassVar[str] = "series"
    root_must_be = "a CSV or Parquet file with a column of times"
    name: Literal["forecast"] = "forecast"
    root: RequiredRoot
    """The file, relative to the folder of `package` if it isn't null."""
    package: PackageName | None = None
    """An installed Python package that ships the file, such as statsmodels; null: a path of its
    own."""
    time_column: str = "time"
    """The column of times, numbers or dates. They must be equally far apart."""
    date_format: str | None = None
    """The format of dates for `datetime.strptime`; null: inferred."""
    value_columns: ColumnNames | None = None
    """The columns that a network reads; null: all but the time."""
    target: ColumnNames | None = None
    """The columns to predict; null: `value_columns`."""
    input_length: PositiveInt
    """Steps that a network reads."""
    horizon: PositiveInt
    """Steps after them to predict."""
    stride: PositiveInt = 1
    """Steps from one training window to the next. Evaluation windows are 1 apart."""
    eval_fraction: Share = 0.2
    """The share of the rows, at the end, that is evaluated."""
    period: PositiveInt = 1
    """Steps of a season, such as 12 for months: the seasonal naive forecast, with which the network
    is compared, is the value of a season before. 1: the last value."""
    standardise: bool = True
    """Whether values become `(value - mean) / std`, by channel, of the training rows."""

    @model_validator(mode="after")
    def _require_one_size(self) -> Forecast:
        for key in ("buckets", "ignore_index"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: must be null; windows have one size")
        if self.folds is not None:
            raise ValueError("folds: must be null; windows of one fold overlap those of another")
        if self.time_column in (*(self.value_columns or ()), *(self.target or ())):
            raise ValueError(
                f"time_column = {self.time_column}: must not be in value_columns or target; a copy "
                "of it can be"
            )
        if self.period > self.input_length:
            raise ValueError(
                f"period = {self.period}: must be at most input_length = {self.input_length}, so "
                "that a window has the season before"
            )
        return self

    def read(self, cache: Path) -> RawData:
        """Return windows, float32 (n, input_length, channels), and numbers, float32 (n, horizon *
        columns), standardised by the training windows."""
        assert isinstance(self.root, Path), "an address is replaced by its copy"
        file = resolve_root(self.root, self.package)
        table = read_table(file, TableFormat(), self._find_kind)
        sizes = WindowSizes(self.input_length, self.horizon, self.stride)
        with name_file(file):
            read_times(table, self.time_column, self.date_format).require_even_steps(
                np.arange(table.rows)
            )
            channels = self.value_columns or tuple(
                name for name in table.columns if name != self.time_column
            )
            if not channels:
                raise ValueError(f"has no column besides {show_name(self.time_column)}")
            target = self.target or channels
            values = _stack_columns(table, channels)
            predicted = _stack_columns(table, target)
            train_rows = split_time(table.rows, self.eval_fraction, sizes)
            scale = fit_scale(values[:train_rows])
            parts = [slice(0, train_rows), slice(train_rows, None)]
            (train, train_numbers), (evaluated, eval_numbers) = (
                cut_windows(values[part].astype(np.float32), predicted[part], sizes, stride)
                for part, stride in zip(parts, (self.stride, 1), strict=True)
            )
            names = tuple(f"{name}+{step + 1}" for step in range(self.horizon) for name in target)
            train_labels, eval_labels, targets = make_number_targets(
                train_numbers, eval_numbers, names, "regression"
            )
            naive = forecast_seasonal_naive(predicted[parts[1]], sizes, self.period)
        targets, note = _compare_with_naive(targets, np.abs(naive - eval_numbers), self.period)
        return RawData(
            Split({"series": train, "label": train_labels}),
            Split({"series": evaluated, "label": eval_labels}),
            targets,
            unit=SampleUnit(
                "windows", "windows", size=f"of {sizes.inputs:,}+{sizes.horizon:,} steps"
            ),
            inputs=("series",),
            notes=(note,),
            scale=scale if self.standardise else None,
        )

    def _find_kind(self, name: str) -> Kind:
        if name == self.time_column:
            return "category"
        if self.value_columns is None or name in (*self.value_columns, *(self.target or ())):
            return "numeric"
        return "ignore"


def _compare_with_naive(targets: Targets, errors: np.ndarray, period: int) -> tuple[Targets, str]:
    """Return the targets with the mean of absolute errors of the seasonal naive forecast, and a
    line about them. `errors` are of the evaluation windows, float64 (n, K)."""
    naive_mae = float(errors.mean())
    name = "the last value" if period == 1 else f"the value of {period:,} steps before"
    note = f"seasonal naive, {name}: mean absolute error {naive_mae:.5g} in the evaluation windows"
    # A series that repeats itself exactly has nothing to compare with.
    return replace(targets, naive_mae=naive_mae or None), note


def _stack_columns(table: RawTable, names: tuple[str, ...]) -> np.ndarray:
    """Return columns of numbers, float64 (rows, columns). Raises ValueError with the line of a
    missing number."""
    for name in names:
        missing = np.flatnonzero(np.isnan(table.get_numbers(name)))
        if missing.size:
            raise ValueError(
                f"{table.locate(int(missing[0]))}: {show_name(name)} is missing; fill it before, "
                "such as with the mean of its neighbours"
            )
    return np.stack([table.get_numbers(name) for name in names], axis=1)


@dataclass(frozen=True)
class WindowSizes:
    """Sizes of windows, in steps."""

    inputs: int
    """Steps that a network reads."""
    horizon: int
    """Steps after them that it predicts."""
    stride: int
    """Steps from one training window to the next."""

    @property
    def length(self) -> int:
        """Steps of a window."""
        return self.inputs + self.horizon


def split_time(rows: int, share: float, sizes: WindowSizes) -> int:
    """Return the number of rows of the training part, which precedes the evaluation part.

    `share` of the rows is evaluated. Raises ValueError if a part is shorter than a window.
    """
    train_rows = rows - round(rows * share)
    for name, count in (("training", train_rows), ("evaluation", rows - train_rows)):
        if count < sizes.length:
            raise ValueError(
                f"has {rows:,} rows, of which dataset.eval_fraction = {share:g} leaves {count:,} "
                f"for {name}; a window has dataset.input_length + dataset.horizon = "
                f"{sizes.length:,}"
            )
    return train_rows


def cut_windows(
    inputs: np.ndarray, targets: np.ndarray, sizes: WindowSizes, stride: int
) -> tuple[np.ndarray, np.ndarray]:
    """Return all windows inside of one part of a series, in the order of time.

    `inputs` are (rows, channels) and `targets` (rows, columns). The windows' inputs are (n, inputs,
    channels), and their targets (n, horizon * columns), step after step. Raises ValueError for too
    little memory.
    """
    starts = np.arange(0, len(inputs) - sizes.length + 1, stride)
    values = sizes.inputs * inputs.shape[1] + sizes.horizon * targets.shape[1]
    require_room(inputs.dtype.itemsize * len(starts) * values, f"{len(starts):,} windows")
    read = starts[:, None] + np.arange(sizes.inputs)
    predicted = starts[:, None] + sizes.inputs + np.arange(sizes.horizon)
    return inputs[read], targets[predicted].reshape(len(starts), -1)


def forecast_seasonal_naive(targets: np.ndarray, sizes: WindowSizes, period: int) -> np.ndarray:
    """Return the values of one season before, for the windows of `cut_windows` with stride 1.

    `targets` are (rows, columns). A step that is further away than one `period` gets the value of
    the last season that the window's inputs have. The result is (n, horizon * columns).
    """
    starts = np.arange(len(targets) - sizes.length + 1)
    steps = np.arange(sizes.horizon)
    seasons = steps // period + 1
    rows = starts[:, None] + sizes.inputs + steps - seasons * period
    return targets[rows].reshape(len(starts), -1)
