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
from pipeline.data.records.record_format import (
    DESCRIPTION,
    RecordSplitSpec,
    RecordsSpec,
    read_description,
)


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
        return RawData(
            train=self._open_split(spec, spec.train),
            eval=self._open_split(spec, spec.eval),
            targets=spec.targets,
            inputs=spec.inputs,
        )

    def _open_split(self, spec: RecordsSpec, split: RecordSplitSpec) -> Split:
        """Return a split. Raises DataError for a damaged file, and for labels in memory that
        aren't classes or `ignore_index`."""
        columns = {name: open_column(self.root, column) for name, column in split.columns.items()}
        label = columns["label"]
        if isinstance(label, np.ndarray) and label.dtype.kind in "iu":
            valid = label[label != self.ignore_index]
            lowest = int(valid.min(initial=0))
            highest = int(valid.max(initial=0))
            if lowest < 0 or highest >= len(spec.classes):
                raise DataError(
                    f"{self.root}: has labels from {lowest} to {highest}; they must be 0 to "
                    f"{len(spec.classes) - 1}, or dataset.ignore_index"
                )
        # The parts of a split that an order may interleave.
        first = next(name for name in (*spec.inputs, *columns) if name != "label")
        files = split.columns[first].files
        return Split(columns, tuple(file.samples for file in files))
