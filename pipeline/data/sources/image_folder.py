"""The user's image files, in a folder for each class or listed in a CSV file."""

from __future__ import annotations

import csv
import math
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_bytes
from pipeline.core.files.name_text import show_name
from pipeline.core.registry import FilePath, Seq, component
from pipeline.data.columns import RawData, Split, Targets, Task, make_number_targets
from pipeline.data.dataset_roots import LocalDatasetSpec, RequiredRoot
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share, hold_out
from pipeline.data.selections import Readable
from pipeline.data.sources.class_folders import IMAGES, list_class_splits
from pipeline.data.sources.image_columns import (
    describe_16_bits,
    describe_pages,
    make_image_columns,
)
from pipeline.data.tables.raw_table import sort_class_names

ImageSize = Annotated[Seq[PositiveInt], Field(min_length=2, max_length=2)]
MAX_TABLE_BYTES = 512 * 2**20
"""Size limit of a table: a few million rows."""


@component("dataset")
class ImageFolder(LocalDatasetSpec):
    """`train/<class>/*.png` and `eval/<class>/*.png`; eval may be called val or test.

    With `split`, there is only `<class>/*.png`, and a share of the images is evaluated. With
    `labels_csv`, a table has the paths of the images and their targets. Formats are PNG, JPEG, BMP,
    GIF (first frame), WebP and TIFF (first page), read as RGB and upright. The names of the
    folders, sorted, are the classes. Images in subfolders belong to the class too.
    """

    root_must_be = (
        "a folder with train/<class>/ and eval/<class>/, with <class>/ and dataset.split, or with "
        "the images of dataset.labels_csv"
    )
    name: Literal["image_folder"] = "image_folder"
    root: RequiredRoot
    """The folder with train and eval, with the classes, or with the images of a table."""
    split: Share | None = None
    """The share of each class that is evaluated; null: all images of eval or `eval_csv` are."""
    split_seed: NonNegativeInt = 0
    """Seed of the split. It isn't `seed`, so runs with different seeds have the same split."""
    labels_csv: FilePath | None = None
    """A CSV file with the paths of images, relative to `root`, and their targets."""
    eval_csv: FilePath | None = None
    """A CSV file of images for evaluation, with the same columns; null: `split` is used."""
    path_column: str | None = None
    """The column of the paths; null: the first column."""
    label_columns: Seq[str] = ()
    """The columns to predict; []: all columns but the paths'."""
    task: Literal["auto", "classification", "regression", "multi_label"] = "auto"
    """The task of the label columns. auto: regression for one column of numbers that aren't all
    whole, classification for another column; multi_label for several columns of 0 and 1, regression
    for several columns of other numbers."""
    follow_links: bool = False
    """Whether links to images and folders outside `root` are read."""
    image_size: ImageSize | None = None
    """[height, width] that images are resized to; null: all have one size, or `buckets` are set."""

    @model_validator(mode="after")
    def _require_one_split(self) -> Self:
        if self.labels_csv is None and self.eval_csv is not None:
            raise ValueError(
                f"eval_csv = {self.eval_csv}: needs labels_csv, the table for training"
            )
        if self.labels_csv is not None and (self.split is None) == (self.eval_csv is None):
            raise ValueError(
                f"labels_csv = {self.labels_csv}: needs either split, the share of its rows to "
                "evaluate, or eval_csv, a table of others"
            )
        return self

    def read(self, cache: Path) -> RawData:
        """Return images, uint8 (n, H, W, 3), decoded on demand, and labels. Labels are int32 (n,)
        for classes, float32 (n, K) for numbers or labels of a table."""
        if self.labels_csv is not None:
            return self._read_tables(self.labels_csv)
        files = list_class_splits(self.root, IMAGES, self._within, self.split, self.split_seed)
        return self._make_data(files.paths, files.labels, Targets(files.classes), files.notes)

    @property
    def _within(self) -> Path | None:
        """The folder that links must not lead out of; None: all links are followed."""
        return None if self.follow_links else self.root.resolve()

    def _read_tables(self, labels_csv: Path) -> RawData:
        """Read the images and labels of one table, whose rows are split, or of two tables."""
        paths, columns = self._read_table(labels_csv)
        count = len(paths)
        if self.eval_csv is not None:
            eval_paths, eval_columns = self._read_table(self.eval_csv)
            if list(columns) != list(eval_columns):
                raise DataError(
                    f"{labels_csv} and {self.eval_csv} must have the same columns to predict, not "
                    f"{', '.join(columns)} and {', '.join(eval_columns)}"
                )
            paths += eval_paths
            for name, values in eval_columns.items():
                columns[name] += values
        with name_file(labels_csv):
            parsed = parse_labels(columns, self.task)
            if self.split is not None:
                train_rows, eval_rows = hold_out(
                    parsed.groups, parsed.names, self.split, self.split_seed
                )
            else:
                train_rows = np.arange(count)
                eval_rows = np.arange(count, len(paths))
            train_labels, eval_labels, targets = parsed.split_labels(train_rows, eval_rows)
        untrained = set(parsed.groups.tolist()) - set(parsed.groups[train_rows].tolist())
        if untrained:
            name = targets.names[min(untrained)]
            raise DataError(f"{self.eval_csv}: has the class {name}, which {labels_csv} lacks")
        split_paths = [[paths[row] for row in rows] for rows in (train_rows, eval_rows)]
        return self._make_data(split_paths, (train_labels, eval_labels), targets)

    def _read_table(self, file: Path) -> tuple[list[str], dict[str, list[str]]]:
        """Read a table as `read_image_table` does. Raises DataError with the file."""
        with name_file(file):
            return read_image_table(
                file,
                self.root,
                self.path_column,
                self.label_columns,
                follow_links=self.follow_links,
            )

    def _make_data(
        self,
        paths: Sequence[Sequence[str]],
        labels: Sequence[np.ndarray],
        targets: Targets,
        notes: tuple[str, ...] = (),
    ) -> RawData:
        """Return the data from the paths and labels of both splits."""
        may_be_damaged = [
            any(isinstance(rule, Readable) for rule in split.select)
            for split in (self.train, self.eval)
        ]
        columns = make_image_columns(
            paths,
            self.image_size,
            several_sizes=self.buckets is not None,
            may_be_damaged=may_be_damaged,
        )
        return RawData(
            train=Split({"image": columns[0], "label": labels[0]}),
            eval=Split({"image": columns[1], "label": labels[1]}),
            targets=targets,
            notes=(*notes, *describe_16_bits(paths[0]), *describe_pages(paths[0])),
        )


def read_image_table(
    file: Path,
    folder: Path,
    path_column: str | None,
    label_columns: Sequence[str],
    *,
    follow_links: bool,
) -> tuple[list[str], dict[str, list[str]]]:
    """Read a CSV file whose first row names its columns, and whose paths are relative to `folder`.
    Return the image file of each row, and the texts of the rows by label column.

    Without `path_column` the first column has the paths; without `label_columns` all other columns
    are labels. `follow_links` permits links that lead out of the folder. Raises OSError if the file
    can't be read. Raises ValueError for a file that isn't a CSV, a missing column or label, and a
    path that leads out of the folder or to a missing file.
    """
    names, rows = _read_rows(file)
    path_index = 0 if path_column is None else _find_column(names, path_column, "path_column")
    label_indices = [_find_column(names, name, "label_columns") for name in label_columns]
    if not label_columns:
        label_indices = [index for index in range(len(names)) if index != path_index]
    if not label_indices:
        raise ValueError(f"has only the column {show_name(names[0])}; labels need another column")
    if path_index in label_indices:
        raise ValueError(f"{show_name(names[path_index])} must not be both the path and a label")
    if not rows:
        raise ValueError("has no rows below the names of its columns")
    for number, row in rows.items():
        if len(row) != len(names):
            raise ValueError(f"row {number} has {len(row)} values for {len(names)} columns")
    labels = {
        names[index]: [row[index].strip() for row in rows.values()] for index in label_indices
    }
    for name, values in labels.items():
        missing = [number for number, value in zip(rows, values, strict=True) if not value]
        if missing:
            raise ValueError(
                f"{show_name(name)} is empty in {len(missing):,} of {len(values):,} rows, first in "
                f"row {missing[0]}; every image needs a label"
            )
    image_names = {number: row[path_index] for number, row in rows.items()}
    return _resolve_paths(image_names, folder, follow_links=follow_links), labels


def _read_rows(file: Path) -> tuple[list[str], dict[int, list[str]]]:
    """Return the names of the columns, all different, and the rows that aren't empty, by their
    numbers in the file. The first row has the number 1."""
    text = read_bytes(file, MAX_TABLE_BYTES).decode("utf-8-sig")
    try:
        reader = csv.reader(StringIO(text, newline=""), strict=True)
        rows = {number: row for number, row in enumerate(reader, 1) if row}
    except csv.Error as error:
        raise ValueError(f"isn't a CSV: {error}") from error
    if not rows:
        raise ValueError("is empty; its first row must name the columns")
    names = rows.pop(min(rows))
    repeated = sorted({name for name in names if names.count(name) > 1})
    if repeated:
        raise ValueError(f"has several columns {show_name(repeated[0])}; names must be different")
    return names, rows


def _find_column(names: Sequence[str], name: str, key: str) -> int:
    """Return the position of a column. Raises ValueError if it is missing."""
    if name not in names:
        listed = ", ".join(map(show_name, names[:10]))
        raise ValueError(f"has no column {show_name(name)}, which {key} names; it has {listed}")
    return names.index(name)


def _resolve_paths(names: Mapping[int, str], folder: Path, *, follow_links: bool) -> list[str]:
    """Return the paths of image files, each joined to the folder. `names` has the path in each row,
    relative to the folder, by the row's number. Raises ValueError for a path that leads out of the
    folder or to a missing file."""
    root = os.path.normpath(folder)
    real_root = os.path.realpath(folder)
    paths = []
    missing_files = []
    for number, name in names.items():
        if "\0" in name:
            raise ValueError(f"row {number}: {show_name(name)} isn't a path")
        path = os.path.normpath(os.path.join(root, name))
        is_inside = _is_inside(path, root)
        if is_inside and not follow_links:
            is_inside = _is_inside(os.path.realpath(path), real_root)
        if not is_inside:
            raise ValueError(
                f"row {number}: {show_name(name)} leads out of {folder}; paths must stay below it"
            )
        if not os.path.isfile(path):
            missing_files.append((number, name))
        paths.append(path)
    if missing_files:
        number, name = missing_files[0]
        raise ValueError(
            f"{len(missing_files):,} of {len(names):,} images are not in {folder}; the first is "
            f"{show_name(name)}, in row {number}"
        )
    return paths


def _is_inside(path: str, folder: str) -> bool:
    return path.startswith(folder.rstrip(os.sep) + os.sep)


@dataclass(frozen=True)
class LabelColumns:
    """The labels of a table as numbers, and the task that they are for."""

    task: Task
    names: tuple[str, ...]
    """Names of the classes of a classification, else of the columns."""
    labels: np.ndarray
    """classification: int32 (n,). Others: float64 (n, columns), for multi_label of 0 and 1."""

    @property
    def groups(self) -> np.ndarray:
        """The groups to split evenly, int (n,): the class of each sample, or 0 for other tasks."""
        if self.task == "classification":
            return self.labels
        return np.zeros(len(self.labels), np.int32)

    def split_labels(
        self, train: np.ndarray, evaluated: np.ndarray
    ) -> tuple[np.ndarray, np.ndarray, Targets]:
        """Return the training labels, the evaluation labels, and the targets. The labels of a
        classification are int32 (n,), others float32 (n, columns). Those of a regression are
        standardised. Raises ValueError if all training labels of a column are equal."""
        train_labels = self.labels[train]
        eval_labels = self.labels[evaluated]
        if self.task == "classification":
            return train_labels, eval_labels, Targets(self.names)
        return make_number_targets(train_labels, eval_labels, self.names, self.task)


def parse_labels(
    columns: Mapping[str, Sequence[str]], task: Literal["auto"] | Task
) -> LabelColumns:
    """Parse labels from columns of text of equal length.

    auto: one column is a regression if all values are numbers and some aren't integers, else a
    classification. Several columns are multi_label if all values are 0 or 1, else a regression.
    Raises ValueError for values that don't fit the task.
    """
    names = tuple(columns)
    if task == "auto":
        task = _infer_task(columns)
    if task == "classification":
        if len(names) > 1:
            raise ValueError(
                f"classes are in one column, not in {', '.join(map(show_name, names))}; name it in "
                "label_columns, or set task"
            )
        return _parse_classes(columns[names[0]])
    numbers = np.stack([_parse_numbers(name, values) for name, values in columns.items()], axis=1)
    if task == "multi_label":
        for name, values in zip(names, numbers.T, strict=True):
            others = values[~np.isin(values, (0, 1))]
            if others.size:
                raise ValueError(
                    f"{show_name(name)} has the value {others[0]:g}; multi_label needs 0 or 1"
                )
    return LabelColumns(task, names, numbers)


def _infer_task(columns: Mapping[str, Sequence[str]]) -> Task:
    """Infer the task from the values, as `parse_labels` describes."""
    try:
        numbers = np.array([[float(value) for value in values] for values in columns.values()])
    except ValueError:
        return "classification" if len(columns) == 1 else "regression"
    if len(columns) == 1:
        return "classification" if (numbers == np.rint(numbers)).all() else "regression"
    return "multi_label" if np.isin(numbers, (0, 1)).all() else "regression"


def _parse_classes(values: Sequence[str]) -> LabelColumns:
    """Parse names of classes. Labels are in the order of `sort_class_names`."""
    names = sort_class_names(values)
    numbers = {name: label for label, name in enumerate(names)}
    labels = np.array([numbers[value] for value in values], np.int32)
    return LabelColumns("classification", names, labels)


def _parse_numbers(name: str, values: Sequence[str]) -> np.ndarray:
    """Parse finite numbers, float64 (n,). Raises ValueError with the first value that isn't one."""
    numbers = np.empty(len(values))
    for row, value in enumerate(values):
        try:
            number = float(value)
        except ValueError:
            raise ValueError(
                f"{show_name(name)} has {show_name(value)}, which isn't a number"
            ) from None
        if not math.isfinite(number):
            raise ValueError(f"{show_name(name)} has {show_name(value)}; must be finite")
        numbers[row] = number
    return numbers
