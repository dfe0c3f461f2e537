"""Datasets in ArrayRecord files: their format, and columns with random access to samples.

Samples are read by grain.

    records.json                                    the description of these files
    train-image-00000-of-00003.array_record         a record for each sample
    train-label-00000-of-00001.array_record         a record for many small samples
    eval-...

A record is a checksum, uint32, and the values, both little-endian. The checksum is the CRC-32 of
the values. Its start value is the CRC-32 of the values in the file's first record, plus the
record's number, so that a record that was moved or copied from another dataset is detected too.
"""

from __future__ import annotations

import bisect
import math
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from itertools import accumulate
from pathlib import Path
from types import SimpleNamespace
from typing import Annotated, Any, Literal, Self

import numpy as np
from pydantic import Field, PositiveFloat, PositiveInt, model_validator

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.error_text import validate_file
from pipeline.core.registry import Seq, Spec
from pipeline.data.columns import Column, Targets, Task, resolve_indices
from pipeline.data.file_errors import name_file
from pipeline.data.padding.buckets import Ragged

DESCRIPTION = "records.json"
FORMAT = "pipeline.records"
CHECKSUM_BYTES = 4
Dtype = Annotated[str, Field(pattern=r"^(bool|u?int(8|16|32|64)|float(16|32|64))$")]
MAX_REQUEST = 4096
"""The most records that are read by one call of grain."""
UNREADABLE_RECORD = (RuntimeError, OSError, ValueError, IndexError, OverflowError, MemoryError)
"""Errors of grain and `decode` for damaged files, mostly RuntimeError and ValueError."""


class RecordFile(Spec):
    """One ArrayRecord file of a column."""

    name: Annotated[str, Field(pattern=r"^[\w-][\w.-]*\.array_record$")]
    samples: PositiveInt
    size_bytes: Annotated[int, Field(gt=0, lt=2**63)]
    first_crc32: Annotated[int, Field(ge=0, lt=2**32)]
    """CRC-32 of the values in the first record."""


class RecordColumnSpec(Spec):
    """One column of a split, in one or more files."""

    dtype: Dtype
    shape: Seq[PositiveInt | None]
    """Shape of one value; null for a dimension that differs between values."""
    samples_per_record: PositiveInt
    files: Seq[RecordFile]
    sizes: RecordColumnSpec | None = None
    """The column of the values' leading dimensions, int32; null: all values have one shape."""

    @property
    def trailing(self) -> tuple[int, ...]:
        """The dimensions that all values share."""
        return tuple(length for length in self.shape if length is not None)

    @property
    def samples(self) -> int:
        return sum(file.samples for file in self.files)

    @model_validator(mode="after")
    def _require_sizes(self) -> Self:
        num_nulls = len(self.shape) - len(self.trailing)
        if any(length is not None for length in self.shape[:num_nulls]):
            raise ValueError(f"shape {list(self.shape)} must have its nulls first")
        sizes_shape = None if self.sizes is None else self.sizes.shape
        if sizes_shape != ((num_nulls,) if num_nulls else None):
            sizes_text = "missing" if sizes_shape is None else sizes_shape
            raise ValueError(
                f"shape {list(self.shape)} has {num_nulls} nulls, sizes are {sizes_text}"
            )
        if self.sizes is not None and (self.sizes.dtype, self.samples_per_record) != ("int32", 1):
            raise ValueError("values of several sizes have int32 sizes and a record each")
        value_bytes = math.prod(self.trailing) * np.dtype(self.dtype).itemsize
        for file in self.files:
            # Records aren't compressed, so small files can't claim large values.
            if file.size_bytes < file.samples * value_bytes:
                raise ValueError(
                    f"{file.name} has {file.size_bytes:,} bytes, too few for {file.samples:,} "
                    f"samples of {value_bytes:,} or more"
                )
        if self.sizes is not None and self.sizes.samples != self.samples:
            raise ValueError(f"{self.samples:,} samples have {self.sizes.samples:,} sizes")
        return self


class RecordSplitSpec(Spec):
    """One split: its number of samples, and its columns."""

    samples: PositiveInt
    columns: Mapping[Annotated[str, Field(pattern=r"^\w+$")], RecordColumnSpec]

    @model_validator(mode="after")
    def _require_equal_lengths(self) -> RecordSplitSpec:
        for name, column in self.columns.items():
            if column.samples != self.samples:
                raise ValueError(
                    f"column {name} has {column.samples:,} samples, the split {self.samples:,}"
                )
        return self


class RecordsSpec(Spec):
    """The content of records.json."""

    format: Literal["pipeline.records"] = "pipeline.records"
    version: Literal[1] = 1
    source: str
    """The dataset that the records were made from."""
    classes: Annotated[Seq[str], Field(min_length=1)]
    """The names of the classes, numbers or labels to predict."""
    task: Task = "classification"
    mean: Seq[float] = ()
    std: Seq[PositiveFloat] = ()
    """Mean and deviation of each number, in the units of the data; empty for other tasks."""
    inputs: Seq[str] = ()
    """Columns that a network reads unless it declares others; empty: the first."""
    train: RecordSplitSpec
    eval: RecordSplitSpec

    @property
    def targets(self) -> Targets:
        """The classes, numbers or labels to predict."""
        return Targets(tuple(self.classes), self.task, tuple(self.mean), tuple(self.std))

    @model_validator(mode="after")
    def _require_units(self) -> RecordsSpec:
        expected_length = len(self.classes) if self.task == "regression" else 0
        if not len(self.mean) == len(self.std) == expected_length:
            raise ValueError(
                f"mean and std have {len(self.mean)} and {len(self.std)} values; {self.task} of "
                f"{len(self.classes)} names needs {expected_length}"
            )
        return self

    @model_validator(mode="after")
    def _require_same_columns(self) -> RecordsSpec:
        kinds = [
            {name: (column.dtype, tuple(column.shape)) for name, column in split.columns.items()}
            for split in (self.train, self.eval)
        ]
        if kinds[0] != kinds[1]:
            raise ValueError(f"train has the columns {kinds[0]}, eval {kinds[1]}; must be the same")
        if "label" not in kinds[0]:
            raise ValueError("lacks the column label")
        if len(kinds[0]) < 2:
            raise ValueError("has only the column label; must have one for networks to read")
        unknown = sorted(set(self.inputs) - set(kinds[0]))
        if unknown:
            raise ValueError(f"inputs: there is no column {', '.join(unknown)}")
        return self


def read_description(folder: Path) -> RecordsSpec:
    """Read the description in a folder. Raises DataError if it is missing or invalid."""
    file = folder / DESCRIPTION
    try:
        tree = read_json(file)
    except OSError as error:
        raise DataError(
            f"{file}: can't be read: {error.strerror}; dataset.root must be a folder that "
            "`python -m pipeline convert records` has written"
        ) from error
    except ValueError as error:
        raise DataError(f"{file}: can't be read as JSON: {error}") from error
    if not isinstance(tree, dict) or tree.get("format") != FORMAT:
        raise DataError(f"{file}: isn't a file of this program; its format must be {FORMAT}")
    return validate_file(RecordsSpec, tree, file)


def encode(values: np.ndarray, first_crc32: int, number: int) -> bytes:
    """Return the bytes of record `number` of a file: checksum and values."""
    body = to_stored_bytes(values)
    return _compute_checksum(body, first_crc32, number).to_bytes(CHECKSUM_BYTES, "little") + body


def to_stored_bytes(values: np.ndarray) -> bytes:
    """Return the bytes of values, in C order, little-endian."""
    return values.astype(values.dtype.newbyteorder("<"), copy=False).tobytes()


def decode(
    record: bytes, dtype: Any, shape: tuple[int, ...], first_crc32: int, number: int
) -> np.ndarray:
    """Return the values of a record, read-only. Raises ValueError for a wrong size or checksum."""
    dtype = np.dtype(dtype)
    expected_bytes = CHECKSUM_BYTES + math.prod(shape) * dtype.itemsize
    if len(record) != expected_bytes:
        raise ValueError(f"has {len(record):,} bytes instead of {expected_bytes:,}")
    body = memoryview(record)[CHECKSUM_BYTES:]
    checksum = int.from_bytes(record[:CHECKSUM_BYTES], "little")
    if checksum != _compute_checksum(body, first_crc32, number):
        raise ValueError("its checksum is wrong")
    return np.frombuffer(body, dtype.newbyteorder("<")).reshape(shape).astype(dtype, copy=False)


def decode_into(records: Sequence[bytes], seeds: Sequence[int], out: np.ndarray) -> None:
    """Write the values of records with one value each into `out`, (n, *shape), whose memory is
    contiguous. It takes half as long as `decode` for small values. `seeds` are the start values of
    the records' checksums. Raises ValueError for a wrong size or checksum."""
    stored = out.dtype.newbyteorder("<")
    rows = out.reshape(len(out), math.prod(out.shape[1:]), copy=False)
    expected_bytes = CHECKSUM_BYTES + rows.shape[1] * stored.itemsize
    for row, record, seed in zip(rows, records, seeds, strict=True):
        if len(record) != expected_bytes:
            raise ValueError("a record has a wrong size")
        body = memoryview(record)[CHECKSUM_BYTES:]
        if int.from_bytes(record[:CHECKSUM_BYTES], "little") != _compute_checksum(body, seed, 0):
            raise ValueError("a checksum is wrong")
        row[:] = np.frombuffer(body, stored)


def _compute_checksum(body: bytes | memoryview, first_crc32: int, number: int) -> int:
    return zlib.crc32(body, (first_crc32 + number) % 2**32)


class RecordColumn:
    """A column of record files, read on demand.

    `sizes`, int32 (samples, dimensions), has the leading dimensions of samples that differ in them.
    With these, or with several samples per record, only `read` can be called.
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
