"""Datasets in ArrayRecord files, written by `python -m pipeline convert records`."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.registry import component
from pipeline.data.columns import RawData, Split
from pipeline.data.dataset_spec import LocalDatasetSpec, RequiredRoot
from pipeline.data.records.record_column import open_column
from pipeline.data.records.record_format import DESCRIPTION, RecordSplitSpec, read_description


@component("dataset")
class Records(LocalDatasetSpec):
    """Samples of another source, stored in ArrayRecord files with random access. Images are read on
    demand, so they may be larger than memory. Labels are in memory."""

    root_must_be = f"a folder with {DESCRIPTION}"
    name: Literal["records"] = "records"
    root: RequiredRoot
    """The folder with records.json."""

    def read(self, cache: Path) -> RawData:
        """Return columns with the shapes and dtypes of the source that was converted."""
        spec = read_description(self.root)
        classes = tuple(spec.classes)
        return RawData(
            train=open_split(self.root, spec.train, len(classes), self.ignore_index),
            eval=open_split(self.root, spec.eval, len(classes), self.ignore_index),
            targets=spec.targets,
            inputs=tuple(spec.inputs),
        )


def open_split(
    folder: Path, spec: RecordSplitSpec, classes: int, ignore_index: int | None
) -> Split:
    """Return a split. `classes` is the number of classes. Raises DataError for a damaged file, and
    for labels in memory that aren't classes or `ignore_index`."""
    columns = {name: open_column(folder, column) for name, column in spec.columns.items()}
    label = columns["label"]
    if isinstance(label, np.ndarray) and label.dtype.kind in "iu":
        valid = label[label != ignore_index]
        lowest = int(valid.min(initial=0))
        highest = int(valid.max(initial=0))
        if lowest < 0 or highest >= classes:
            raise DataError(
                f"{folder}: has labels from {lowest} to {highest}; they must be 0 to "
                f"{classes - 1}, or dataset.ignore_index"
            )
    return Split(columns, tuple(file.samples for file in spec.columns["image"].files))
