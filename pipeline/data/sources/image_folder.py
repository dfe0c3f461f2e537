"""The user's image files, in a folder for each class or listed in a CSV file."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.registry import FilePath, Seq, component
from pipeline.data.columns import RawData, Split
from pipeline.data.dataset_spec import LocalDatasetSpec, RequiredRoot
from pipeline.data.file_errors import name_file
from pipeline.data.held_out import Share, hold_out
from pipeline.data.image_table import parse_labels, read_image_table
from pipeline.data.selections import Readable
from pipeline.data.sources.class_folders import IMAGES, list_class_splits
from pipeline.data.sources.image_columns import make_image_columns
from pipeline.data.targets import Targets, Task

ImageSize = Annotated[Seq[PositiveInt], Field(min_length=2, max_length=2)]


@component("dataset")
class ImageFolder(LocalDatasetSpec):
    """`train/<class>/*.png` and `eval/<class>/*.png`; eval may be called val or test.

    With `split`, there is only `<class>/*.png`, and a share of the images is evaluated. With
    `labels_csv`, a table has the paths of the images and their targets. Formats are PNG, JPEG, BMP,
    GIF (first frame) and WebP, read as RGB and upright. The names of the folders, sorted, are the
    classes. Images in subfolders belong to the class too.
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
    task: Literal["auto"] | Task = "auto"
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
            notes=notes,
        )
