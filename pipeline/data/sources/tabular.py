"""The user's tables, CSV or Parquet. Some columns are predicted from other columns."""

from __future__ import annotations

from abc import abstractmethod
from collections import Counter
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import (
    AfterValidator,
    BeforeValidator,
    Field,
    NonNegativeInt,
    PositiveInt,
    WithJsonSchema,
    field_validator,
    model_validator,
)

from pipeline.core.errors import DataError
from pipeline.core.files.name_text import show_name
from pipeline.core.registry import FilePath, Location, Seq, component
from pipeline.data.columns import RawData, SampleUnit, Split, Targets, make_number_targets
from pipeline.data.dataset_roots import LocalDatasetSpec, RequiredRoot
from pipeline.data.dataset_spec import DatasetSpec
from pipeline.data.file_errors import SIZED_BY_FILE, name_file
from pipeline.data.held_out import split_rows
from pipeline.data.table import Delimiter, Encoding, FittedTable, Kind, TableFormat
from pipeline.data.tables.fit_table import (
    FitOptions,
    describe_columns,
    encode_rows,
    fit_table,
    read_encoded_rows,
    read_table,
)
from pipeline.data.tables.identifiers import IdentifiersAs, find_identifiers
from pipeline.data.tables.quantities import format_example_date, require_units
from pipeline.data.tables.raw_table import RawTable, describe_missing_column
from pipeline.data.tables.table_targets import (
    describe_rare_class,
    infer_task,
    list_target_classes,
    read_labels,
)

_SHIPPED = Path(__file__).parent
ShippedTable = Literal["breast_cancer", "diabetes", "wine"]


def _require_date_format(date_format: str) -> str:
    format_example_date(date_format)
    return date_format


TargetNames = Annotated[
    Seq[str],
    Field(min_length=1),
    BeforeValidator(lambda target: [target] if isinstance(target, str) else target),
    WithJsonSchema(
        {"anyOf": [{"type": ["string", "null"]}, {"type": "array", "items": {"type": "string"}}]}
    ),
]
"""A name or several names; null in conf/, so that a recipe must set it."""
DateFormat = Annotated[str, AfterValidator(_require_date_format)]


class TableDataset(DatasetSpec):
    """Base of the sources of tables. A sample is an encoded row, float32 (columns,). The encoding
    is fitted on the training split, and saved with the run."""

    content: ClassVar[str] = "columns"
    root_must_be: ClassVar[str]
    root: Location | None
    """The file."""
    target: TargetNames
    """The column to predict, or several columns, all of numbers or all of 0 and 1."""
    task: Literal["auto", "classification", "regression", "multi_label"] = "auto"
    """The task. auto: classification for a column of texts or of at most 20 different whole
    numbers, multi_label for several columns of 0 and 1, else regression."""
    eval_path: FilePath | None = None
    """A second file, whose rows are evaluated; null: a share of the rows of `root` is."""
    split: Annotated[float, Field(gt=0, lt=1)] = 0.2
    """The share of the rows that is evaluated, the same for each class of a classification."""
    split_seed: NonNegativeInt = 0
    """Seed of the split. It isn't `seed`, so runs with different seeds have the same split."""
    columns: Seq[str] | None = None
    """Columns to predict from; null: all others."""
    numeric: Seq[str] = ()
    """Columns of numbers. An unlisted column is one if all its values are numbers or missing."""
    categories: Seq[str] = ()
    """Columns of categories, also of numbers such as postcodes. An unlisted column is one if it has
    neither numbers nor dates."""
    dates: Seq[str] = ()
    """Columns of dates. An unlisted column is one if one format fits all its training values."""
    date_format: DateFormat | None = None
    """The format of dates for `datetime.strptime`, such as %d/%m/%Y; null: inferred."""
    ignored: Seq[str] = ()
    """Columns that aren't read, such as row numbers."""
    standardise: bool = True
    """Whether numbers become `(number - mean) / std`."""
    robust: bool = False
    """Whether median and quartiles take the place of mean and deviation: a number becomes x =
    (number - median) / (upper - lower quartile), and then x / sqrt(1 + (x / 3)^2), within 3."""
    identifiers: IdentifiersAs = "numbers"
    """How columns of whole numbers are read whose values explain the target and whose order
    doesn't, such as a school's number. A note in the log names them."""
    missing_indicators: bool = False
    """Whether a column with missing numbers gets another one: 1 if a number is missing, else 0."""
    max_categories: PositiveInt = 1_000
    """The most categories of a column. Less frequent values are encoded as one unknown value."""

    @field_validator("target", mode="before")
    @classmethod
    def _require_target(cls, target: Any) -> Any:
        if target is None:
            raise ValueError("missing; it must be the name of the column to predict, or several")
        return target

    @model_validator(mode="after")
    def _require_no_image_settings(self) -> Self:
        for key, value in (("buckets", self.buckets), ("ignore_index", self.ignore_index)):
            if value is not None:
                raise ValueError(f"{key}: must be null; the rows of a table have one shape")
        return self

    @model_validator(mode="after")
    def _require_columns_once(self) -> Self:
        names = (*self.target, *self.numeric, *self.categories, *self.dates, *self.ignored)
        repeated = [name for name, count in Counter(names).items() if count > 1]
        if repeated:
            raise ValueError(
                f"{show_name(repeated[0])} is named more than once by target, numeric, "
                "categories, dates and ignored"
            )
        return self

    @property
    @abstractmethod
    def file(self) -> Path:
        """The file of the training split."""

    @property
    def form(self) -> TableFormat:
        """The format of CSV files. Parquet files don't need it."""
        return TableFormat()

    def read(self, cache: Path) -> RawData:
        """Return encoded rows, float32 (n, columns), and labels, int32 (n,) for classes, else
        float32 (n, K). Numbers to predict are standardised by the training split."""
        raw = self._read_train_file()
        locate_in_file = raw.locate
        with name_file(self.file, SIZED_BY_FILE):
            targets = self._infer_targets(raw)
            if targets.task == "classification":
                raw = raw.keep_texts(self.target)
            labels = read_labels(raw, targets, self.target)
            train_rows, eval_rows = self._choose_rows(raw, targets, labels)
            train_labels = labels[train_rows]
            table, notes = self._fit(raw, train_rows, train_labels, targets)
            rows = encode_rows(table, raw)
        notes += describe_rare_class(train_labels, targets)
        eval_inputs = rows[eval_rows]
        eval_labels = labels[eval_rows]
        if self.eval_path is not None:
            eval_inputs, eval_raw = read_encoded_rows(self.eval_path, table, self.target)
            with name_file(self.eval_path, SIZED_BY_FILE):
                if targets.task == "classification":
                    eval_raw = eval_raw.keep_texts(self.target)
                units = {name: quantity.unit for name, quantity in raw.quantities.items()}
                require_units(eval_raw, {name: units.get(name, "") for name in self.target})
                eval_labels = read_labels(eval_raw, targets, self.target)
        with name_file(self.file, SIZED_BY_FILE):
            if targets.task == "multi_label" and (train_labels == train_labels[:1]).all():
                raise ValueError(
                    "the labels are the same in all rows; nothing can be learned from them"
                )
            if targets.task != "classification":
                train_labels, eval_labels, targets = make_number_targets(
                    train_labels, eval_labels, self.target, targets.task
                )

        def locate(row: int) -> str:
            return f"{self.file}, {locate_in_file(int(train_rows[row]))}"

        return RawData(
            train=Split({"features": rows[train_rows], "label": train_labels}, locate=locate),
            eval=Split({"features": eval_inputs, "label": eval_labels}),
            targets=targets,
            table=table,
            unit=SampleUnit("rows", "rows", size=f"of {table.width} columns"),
            inputs=("features",),
            notes=notes,
        )

    def _fit(
        self, raw: RawTable, rows: np.ndarray, labels: np.ndarray, targets: Targets
    ) -> tuple[FittedTable, tuple[str, ...]]:
        """Fit the columns on the training rows, int (n,), and their labels, (n,) or (n, K). Return
        them with notes for the log. Raises ValueError without a column to predict from."""
        features = [name for name in raw.columns if name not in self.target]
        if not features:
            raise ValueError("has only target columns; a network needs another one to predict from")
        classes = len(targets) if targets.task == "classification" else None
        inferred = [name for name in features if self._find_kind(name) == "auto"]
        identifiers = list(find_identifiers(raw, inferred, rows, labels, classes))
        read_as = self.identifiers
        names = {column.name for column in identifiers} if read_as == "categories" else ()
        options = FitOptions(
            kind_of=self._find_kind,
            standardise=self.standardise,
            robust=self.robust,
            indicators=self.missing_indicators,
            max_categories=self.max_categories,
            date_format=self.date_format,
            identifiers=names,
        )
        table = fit_table(raw, features, rows, self.form, options)
        notes = describe_columns(raw, rows, table, self._find_kind)
        return table, (*notes, *(column.describe(read_as) for column in identifiers))

    def _read_train_file(self) -> RawTable:
        """Read the training file. Raises DataError for a missing column and for no rows."""
        raw = read_table(self.file, self.form, self._find_kind)
        column_lists = {
            "target": self.target,
            "columns": [name for name in self.columns or () if name not in self.ignored],
            "numeric": self.numeric,
            "categories": self.categories,
            "dates": self.dates,
        }
        for key, names in column_lists.items():
            for name in names:
                if name not in raw.columns:
                    problem = describe_missing_column(name, raw.names)
                    raise DataError(f"{self.file}: {problem} (dataset.{key})")
        if not raw.rows:
            raise DataError(f"{self.file}: has no rows")
        return raw

    def _find_kind(self, name: str) -> Kind:
        """Return the kind of a column that the recipe sets; auto if it doesn't set one."""
        if name in self.target:
            return "auto"
        if name in self.ignored or (self.columns is not None and name not in self.columns):
            return "ignore"
        if name in self.numeric:
            return "numeric"
        if name in self.dates:
            return "date"
        return "category" if name in self.categories else "auto"

    def _infer_targets(self, raw: RawTable) -> Targets:
        """Return the targets. Raises ValueError for columns that don't fit the task."""
        task = infer_task(raw, self.target) if self.task == "auto" else self.task
        if task != "classification":
            return Targets(self.target, task)
        if len(self.target) > 1:
            raise ValueError(
                f"dataset.target has {len(self.target)} columns; classification needs exactly one"
            )
        return Targets(list_target_classes(raw.keep_texts(self.target), self.target[0]), task)

    def _choose_rows(
        self, raw: RawTable, targets: Targets, labels: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray]:
        """Return the rows of the training file for training and for evaluation, int64. Raises
        ValueError if a split has no rows."""
        if self.eval_path is not None:
            return np.arange(raw.rows), np.arange(0)
        strata = None
        if targets.task == "classification":
            strata = labels
        elif targets.task == "multi_label":
            _, combinations = np.unique(labels, axis=0, return_inverse=True)
            strata = combinations.ravel()
        train, evaluated = split_rows(raw.rows, self.split, self.split_seed, strata)
        if not len(train) or not len(evaluated):
            raise ValueError(
                f"has {raw.rows:,} rows, of which dataset.split = {self.split:g} leaves "
                f"{len(train):,} for training and {len(evaluated):,} for evaluation; both need at "
                "least one"
            )
        return train, evaluated


@component("dataset")
class CsvTable(TableDataset):
    """A CSV file, with any delimiter, or a .jsonl file with an object on each line."""

    root_must_be = "a CSV file; dataset.shipped names one of the package"
    name: Literal["csv"] = "csv"
    shipped: ShippedTable | None = None
    """A table of this package in place of `root`; `tables.txt` beside it has the sources."""
    delimiter: Delimiter | None = None
    """The character between fields; a space stands for one or more. null: the most frequent of
    comma, semicolon, tab and bar in the first line. If it has none, fields are split at spaces."""
    header: bool = True
    """Whether the first line has the names of columns; else they are column 1, column 2, ..."""
    decimal: Literal[".", ","] = "."
    """The decimal mark of numbers."""
    encoding: Encoding = "utf-8"
    """The encoding of the file, such as latin-1 or utf-16."""
    missing_values: Seq[str] = ("NA", "N/A", "NaN", "nan", "null", "NULL", "?")
    """Texts of missing values, besides the empty text."""

    @model_validator(mode="after")
    def _require_one_file(self) -> Self:
        if (self.root is None) == (self.shipped is None):
            problem = "missing" if self.root is None else "must be null with dataset.shipped"
            raise ValueError(f"root: {problem}; it must be {self.root_must_be}")
        return self

    @property
    def file(self) -> Path:
        if self.root is None:
            return _SHIPPED / f"{self.shipped}.csv"
        return self.root

    @property
    def form(self) -> TableFormat:
        return TableFormat(**{key: getattr(self, key) for key in TableFormat.model_fields})


@component("dataset")
class ParquetTable(TableDataset, LocalDatasetSpec):
    """A Parquet file."""

    root_must_be = "a Parquet file"
    name: Literal["parquet"] = "parquet"
    root: RequiredRoot

    @property
    def file(self) -> Path:
        return self.root
