"""Columns of ArrayRecord files, with random access to samples by grain."""

from __future__ import annotations

import bisect
import math
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np

from pipeline.core.errors import DataError
from pipeline.data.columns import Column, resolve_indices
from pipeline.data.file_errors import name_file
from pipeline.data.padding.buckets import Ragged
from pipeline.data.records.record_format import RecordColumnSpec, decode, decode_into

MAX_REQUEST = 4096
"""The most records that are read by one call of grain."""
UNREADABLE_RECORD = (RuntimeError, OSError, ValueError, IndexError, OverflowError, MemoryError)
"""Errors of grain and `decode` for damaged files, mostly RuntimeError and ValueError."""


class RecordColumn:
    """A column of record files with one sample per record, read on demand.

    If a record has several samples, or if samples differ in their leading dimensions, `sizes`,
    int32 (samples, dimensions), only `read` can be called.
    """

    def __init__(
        self, folder: Path, spec: RecordColumnSpec, sizes: np.ndarray | None = None
    ) -> None:
        # The import takes 0.1 s, and few runs need it.
        from grain.sources import ArrayRecordDataSource

        self._folder = folder
        self._spec = spec
        self._sizes = sizes
        self.dtype = np.dtype(spec.dtype)
        counts = [-(-file.samples // spec.samples_per_record) for file in spec.files]
        self._ends = list(accumulate(counts))
        self.num_records = self._ends[-1]
        # With the number of records, grain doesn't open the files to count them.
        spans = [
            SimpleNamespace(
                filename=str(folder / file.name), skip=0, take=count, examples_in_shard=count
            )
            for file, count in zip(spec.files, counts, strict=True)
        ]
        self._source = ArrayRecordDataSource(spans)

    @property
    def shape(self) -> tuple[int, ...]:
        return (self._spec.samples, *self._spec.trailing)

    def __getitem__(self, indices: Any) -> np.ndarray:
        rows = resolve_indices(indices, self._spec.samples)
        values = np.empty((len(rows), *self._spec.trailing), self.dtype)
        self.read_into(rows, values)
        return values

    def sample(self, index: int) -> np.ndarray:
        return self.read(index)[0]

    def sample_name(self, index: int) -> str:
        file_number, number = self._locate(index)
        return f"{self._folder / self._spec.files[file_number].name}, record {number}"

    def read(self, record: int) -> np.ndarray:
        """Return the samples of a record, (n, *shape). Raises DataError if it is damaged."""
        file_number, number = self._locate(record)
        file = self._spec.files[file_number]
        per_record = self._spec.samples_per_record
        samples = min(per_record, file.samples - number * per_record)
        sizes = () if self._sizes is None else self._sizes[record].tolist()
        shape = (samples, *sizes, *self._spec.trailing)
        try:
            return decode(self._source[record], self.dtype, shape, file.first_crc32, number)
        except UNREADABLE_RECORD as error:
            raise DataError(
                f"{self.sample_name(record)}: is damaged or of another dataset: {error}"
            ) from error

    def read_into(self, indices: np.ndarray, out: np.ndarray) -> None:
        file_numbers = np.searchsorted(self._ends, indices, side="right")
        starts = np.array([0, *self._ends[:-1]], np.int64)
        first_crcs = np.array([file.first_crc32 for file in self._spec.files], np.int64)
        seeds = first_crcs[file_numbers] + indices - starts[file_numbers]
        for first in range(0, len(indices), MAX_REQUEST):
            batch = slice(first, first + MAX_REQUEST)
            requested = indices[batch].tolist()
            try:
                contents = self._source.__getitems__(requested)
                decode_into(contents, seeds[batch].tolist(), out[batch])
            except UNREADABLE_RECORD:
                # Reading one record at a time raises an error with the damaged record.
                for position, record in enumerate(requested):
                    out[first + position] = self.sample(record)

    def _locate(self, record: int) -> tuple[int, int]:
        """Return the number of the file that has a record, and the record's number in the file."""
        file_number = bisect.bisect_right(self._ends, record)
        start = self._ends[file_number - 1] if file_number else 0
        return file_number, record - start


@dataclass(frozen=True)
class RaggedRecordColumn(Ragged):
    """A `RaggedColumn` of record files, with one sample per record."""

    records: RecordColumn
    sizes: np.ndarray
    trailing: tuple[int, ...]
    dtype: np.dtype[Any]

    def value(self, index: int) -> np.ndarray:
        return self.records.sample(index)

    def sample_name(self, index: int) -> str:
        return self.records.sample_name(index)


def open_column(folder: Path, spec: RecordColumnSpec) -> Column:
    """Return a column of files in `folder`. If records have several samples it is in memory, else
    it is read on demand. Raises DataError for files of other sizes than in the description."""
    for file in spec.files:
        with name_file(folder / file.name):
            size_bytes = (folder / file.name).stat().st_size
            if size_bytes != file.size_bytes:
                raise ValueError(f"has {size_bytes:,} bytes instead of {file.size_bytes:,}")
    dtype = np.dtype(spec.dtype)
    if spec.sizes is not None:
        sizes = open_column(folder, spec.sizes)[:]
        lengths = sizes.astype(np.float64).prod(axis=1)
        value_bytes = math.prod(spec.trailing) * dtype.itemsize
        files_bytes = sum(file.size_bytes for file in spec.files)
        if sizes.min() < 1 or lengths.sum() * value_bytes > files_bytes:
            raise DataError(f"{folder}: has values of sizes that its files can't hold")
        return RaggedRecordColumn(RecordColumn(folder, spec, sizes), sizes, spec.trailing, dtype)
    column = RecordColumn(folder, spec)
    if spec.samples_per_record == 1:
        return column
    return np.concatenate([column.read(record) for record in range(column.num_records)])
