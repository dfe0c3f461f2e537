"""The user's series: with labels, as .ts, .npz or tables with a row for each step, and as windows
to forecast from a table with a column of times."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import BeforeValidator, Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.host.memory import require_room
from pipeline.core.registry import FilePath, Seq, component
from pipeline.data.columns import RawData, SampleUnit, Split, Targets, make_number_targets
from pipeline.data.dataset_roots import LocalDatasetSpec, RequiredRoot
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share, split_rows
from pipeline.data.series.series_columns import fit_scale, read_times
from pipeline.data.series.series_files import (
    LongForm,
    PackageName,
    RawSeries,
    read_series,
    resolve_root,
    stack_series,
)
from pipeline.data.table import Kind, TableFormat
from pipeline.data.tables.fit_table import read_table
from pipeline.data.tables.raw_table import RawTable

_TRAIN, _TEST = "_TRAIN.ts", "_TEST.ts"


@component("dataset")
class LabelledSeries(LocalDatasetSpec):
    """Series with a class or a number each: the column `series`, float32 (steps, channels).

    A .ts file of the UCR and UEA archives that ends in _TRAIN.ts has the file _TEST.ts beside it
    for evaluation, and a folder NAME stands for NAME/NAME_TRAIN.ts. An .npz file has the arrays
    `series`, (n, steps) or (n, steps, channels), and `label`, (n,). A CSV or Parquet file has a row
    for each step, with columns of the series, the time and the label, and a column for each
    channel.
    """

    content: ClassVar[str] = "series"
    root_must_be = "a .ts, .npz, .csv or .parquet file of series"
    name: Literal["series"] = "series"
    root: RequiredRoot
    """The file, relative to the folder of `package` if it isn't null."""
    package: PackageName | None = None
    """An installed Python package that ships the file, such as aeon; null: a path of its own."""
    eval_path: FilePath | None = None
    """A second file, whose series are evaluated. null: the file _TEST.ts beside _TRAIN.ts, else a
    share of `root`."""
    split: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of the series that is evaluated, the same of each class."""
    split_seed: NonNegativeInt = 0
    """Seed of the split. It isn't `seed`, so runs with different seeds have the same split."""
    task: Literal["classification", "regression"] = "classification"
    length: PositiveInt | None = None
    """Steps of each series: longer series lose their end, and shorter ones are padded at the end
    with the means of their channels. null: all series must be equally long."""
    standardise: bool = True
    """Whether values become `(value - mean) / std`, by channel, of the training series."""
    series_column: str = "series"
    """The column of a table with the name of the series."""
    time_column: str = "time"
    label_column: str = "label"
    value_columns: Seq[str] | None = None
    """The columns of a table with the channels; null: all others."""
    date_format: str | None = None
    """The format of dates in `time_column` for `datetime.strptime`; null: inferred."""

    @model_validator(mode="after")
    def _require_one_size(self) -> LabelledSeries:
        for key in ("buckets", "ignore_index"):
            if getattr(self, key) is not None:
                raise ValueError(f"{key}: must be null; dataset.length is the size of series")
        return self

    def read(self, cache: Path) -> RawData:
        """Return series, float32 (n, steps, channels), and labels, int32 (n,) for classes, else
        float32 (n, 1)."""
        train_file, eval_file = self._find_files()
        form = LongForm(
            self.series_column,
            self.time_column,
            self.label_column,
            self.value_columns,
            self.date_format,
        )
        files = {file: read_series(file, form) for file in (train_file, eval_file) if file}
        train_raw = files[train_file]
        labels, targets = self._make_labels(files)
        series = stack_series(files, self.length)
        if eval_file is None:
            rows = self._choose_rows(train_file, train_raw)
            series = [series[0][part] for part in rows]
            labels = [labels[0][part] for part in rows]
        if self.task == "regression":
            with name_file(train_file):
                train, evaluated, targets = make_number_targets(
                    labels[0], labels[1], (self.label_column,), self.task
                )
            labels = [train, evaluated]
        scale = fit_scale(series[0])
        # Padding is 0 once it is standardised, else the mean too.
        filled = [np.where(np.isnan(a), np.array(scale.mean), a).astype(np.float32) for a in series]
        train_split, eval_split = (
            Split({"series": values, "label": numbers})
            for values, numbers in zip(filled, labels, strict=True)
        )
        steps, channels = filled[0].shape[1:]
        return RawData(
            train_split,
            eval_split,
            targets,
            unit=SampleUnit("series", "series", size=f"of {steps:,} steps x {channels}"),
            inputs=("series",),
            notes=_describe_lengths(train_raw, steps),
            scale=scale if self.standardise else None,
        )

    def _find_files(self) -> tuple[Path, Path | None]:
        """Return the file of the training split, and of the evaluation split if there is one.
        Raises DataError if a file _TRAIN.ts has no _TEST.ts beside it."""
        assert isinstance(self.root, Path), "an address is replaced by its copy"
        file = resolve_root(self.root, self.package)
        if file.is_dir():
            file = file / f"{file.name}{_TRAIN}"
        if self.eval_path is not None:
            if self.eval_path.resolve() == file.resolve():
                raise DataError(
                    f"dataset.eval_path = {file}: must be another file than dataset.root"
                )
            return file, self.eval_path
        if not file.name.endswith(_TRAIN):
            return file, None
        test_file = file.with_name(file.name.removesuffix(_TRAIN) + _TEST)
        if file.is_file() and not test_file.is_file():
            raise DataError(
                f"{file}: lacks {test_file.name} beside it; or name the file for evaluation: "
                "dataset.eval_path=FILE"
            )
        return file, test_file

    def _choose_rows(self, file: Path, raw: RawSeries) -> tuple[np.ndarray, np.ndarray]:
        """Return the series for training and for evaluation, int64. Raises DataError if a split has
        none."""
        strata = None
        if self.task == "classification":
            strata = raw.number_labels(raw.list_classes())
        train, evaluated = split_rows(len(raw.labels), self.split, self.split_seed, strata)
        if not len(train) or not len(evaluated):
            raise DataError(
                f"{file}: has {len(raw.labels):,} series, of which dataset.split = {self.split:g} "
                f"leaves {len(train):,} for training and {len(evaluated):,} for evaluation; both "
                "need at least one"
            )
        return train, evaluated

    def _make_labels(self, files: dict[Path, RawSeries]) -> tuple[list[np.ndarray], Targets]:
        """Return the labels of each file, int32 (n,) or float64 (n, 1), and the targets. Raises
        DataError for a label that isn't a number or a class of the first file."""
        first_file, first = next(iter(files.items()))
        if self.task == "regression":
            labels = []
            for file, raw in files.items():
                with name_file(file):
                    labels.append(raw.parse_numbers())
            return labels, Targets((self.label_column,), "regression")
        classes = first.list_classes()
        if len(classes) < 2:
            raise DataError(f"{first_file}: all series have one class; must have at least two")
        labels = []
        for file, raw in files.items():
            with name_file(file):
                labels.append(raw.number_labels(classes))
        return labels, Targets(classes)


def _describe_lengths(raw: RawSeries, steps: int) -> tuple[str, ...]:
    """Return a line about training series that are cut or padded."""
    lengths = np.array([len(values) for values in raw.values])
    cut, padded = int((lengths > steps).sum()), int((lengths < steps).sum())
    if not cut and not padded:
        return ()
    return (
        f"series of {lengths.min():,} to {lengths.max():,} steps in the training file: "
        f"{cut:,} cut and {padded:,} padded to {steps:,}",
    )


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
