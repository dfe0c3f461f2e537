"""The user's series with labels, as .ts, .npz or tables with a row for each step."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, ClassVar, Literal

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.registry import FilePath, Seq, component
from pipeline.data.columns import RawData, SampleUnit, Split
from pipeline.data.dataset_spec import LocalDatasetSpec, RequiredRoot
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import split_rows
from pipeline.data.series.package_file import PackageName, resolve_root
from pipeline.data.series.scale_series import fit_scale
from pipeline.data.series.series_files import LongForm, RawSeries, read_series, stack_series
from pipeline.data.targets import Targets, make_number_targets

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
