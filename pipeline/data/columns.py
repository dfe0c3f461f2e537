"""Raw data: two splits of named columns of equal length."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import Any, Literal, Protocol, runtime_checkable

import numpy as np

from pipeline.data.table import FittedTable
from pipeline.data.targets import Targets
from pipeline.data.text.text_format import TextFormat

SplitKey = Literal["train", "eval"]
DECODING_THREADS = min(8, os.cpu_count() or 1)
"""Threads that read the samples of a `LazyColumn`."""


class Column(Protocol):
    """One value per sample, in a numpy array or decoded on demand."""

    @property
    def shape(self) -> tuple[int, ...]:
        """(samples, *shape of one value)."""

    @property
    def dtype(self) -> np.dtype[Any]:
        """The dtype of the values."""

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Return the stacked values at an integer array of sample indices or at a slice."""


@runtime_checkable
class LazyColumn(Column, Protocol):
    """A column whose samples are slow to read, so that several threads read them one by one."""

    def sample(self, index: int) -> np.ndarray:
        """Return the value of a sample. Raises DataError if it can't be read."""

    def sample_name(self, index: int) -> str:
        """Return the name of a sample for messages, such as its file."""


@runtime_checkable
class BatchedColumn(LazyColumn, Protocol):
    """A column that reads many samples faster in one request than one by one."""

    def read_into(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Read the samples at indices, int (n,), into `out`, (n, *shape of one value). Raises
        DataError if a sample can't be read."""


def resolve_indices(indices: Any, samples: int) -> np.ndarray:
    """Return sample indices, int64 (n,), of an array, a bool mask (samples,) or a slice. Negative
    indices count from the end. Raises IndexError for an index out of range, and for a mask of
    another shape."""
    if isinstance(indices, slice):
        return np.arange(*indices.indices(samples))
    rows = np.asarray(indices)
    if rows.dtype == bool:
        if rows.shape != (samples,):
            raise IndexError(f"a mask of shape {rows.shape}; there are {samples} samples")
        return np.flatnonzero(rows)
    rows = rows.astype(np.int64)
    out_of_range = rows[(rows < -samples) | (rows >= samples)]
    if out_of_range.size:
        raise IndexError(f"index {out_of_range[0]} is out of bounds; there are {samples} samples")
    return np.where(rows < 0, rows + samples, rows)


def read_sample(column: Column, index: int) -> np.ndarray:
    """Return the value of a sample. Raises DataError if it can't be read."""
    if isinstance(column, LazyColumn):
        return column.sample(index)
    return column[np.array([index])][0]


def name_sample(column: Column, index: int) -> str:
    """Return the name of a sample for messages."""
    return column.sample_name(index) if isinstance(column, LazyColumn) else f"sample {index}"


def read_samples(column: LazyColumn, indices: Any) -> np.ndarray:
    """Read the values of a lazy column at an array of indices or a slice, in several threads."""
    rows = resolve_indices(indices, column.shape[0])
    values = np.empty((len(rows), *column.shape[1:]), column.dtype)
    with ThreadPoolExecutor(DECODING_THREADS) as pool:
        for position, value in enumerate(pool.map(column.sample, rows)):
            values[position] = value
    return values


@dataclass(frozen=True)
class ColumnSpec:
    """Shape and dtype of one value of a column; images are HWC until `hwc2chw` permutes axes."""

    shape: tuple[int, ...]
    dtype: str
    layout: Literal["hwc", "chw"] = "hwc"


@dataclass(frozen=True)
class Split:
    """The training or evaluation split of a dataset, before map ops: columns of equal length."""

    columns: Mapping[str, Column]
    files: tuple[int, ...] = ()
    """Number of samples in each file, in the order of samples; empty if unknown."""
    padding: int = 0
    """Number of rows of zeros that a device has after the samples, so that folds of different sizes
    share a program. No step reads them."""
    numbers: np.ndarray | None = None
    """The number of each sample in the split as it was read, int64 (n,); None: 0 to n - 1."""

    def __len__(self) -> int:
        return min(column.shape[0] for column in self.columns.values())

    def list_numbers(self) -> np.ndarray:
        """Return the number of each sample in the split as it was read, int64 (n,)."""
        return np.arange(len(self)) if self.numbers is None else self.numbers

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample before map ops, in all columns."""
        return sum(
            math.prod(column.shape[1:]) * np.dtype(column.dtype).itemsize
            for column in self.columns.values()
        )

    def specs(self) -> dict[str, ColumnSpec]:
        """Return the shape and dtype of one value, by column."""
        return {
            name: ColumnSpec(tuple(column.shape[1:]), np.dtype(column.dtype).name)
            for name, column in self.columns.items()
        }


@dataclass(frozen=True)
class SampleUnit:
    """The words of the log for samples and for the unit of speed."""

    samples: str = "images"
    """The word for samples: images, rows, windows or texts."""
    plural: str = "images"
    """The unit of speed, such as tokens in tokens/s."""
    per_sample: int = 1
    """The number of units of speed in a sample."""
    size: str | None = None
    """Size of a sample in words, such as "of 128 tokens"; None: the log has its shape."""


IMAGES = SampleUnit()


@dataclass(frozen=True)
class RawData:
    """Data of a source: both splits, and the targets."""

    train: Split
    eval: Split
    targets: Targets
    table: FittedTable | None = None
    """The columns of a table; None: not a table. Its encoded rows are in the splits under the name
    `image`, as any input of a network."""
    unit: SampleUnit = IMAGES
    text: TextFormat | None = None
    """The tokenizer of texts, and what a network predicts from them; None for other samples."""
    notes: tuple[str, ...] = ()
    """Lines for the log about the data, such as files that were left out."""

    def with_split(self, key: SplitKey, split: Split) -> RawData:
        """Return the data with another training or evaluation split."""
        return replace(self, train=split) if key == "train" else replace(self, eval=split)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the network's outputs, in their order: classes, numbers or labels."""
        return self.targets.names


@dataclass(frozen=True)
class Facts:
    """Sizes of a dataset that are known before reading it; `image` is (height, width, channels)."""

    image: tuple[int, int, int]
    classes: int
    train_size: int
    eval_size: int


@dataclass(frozen=True)
class BlankColumn:
    """Column of zeros in place of samples that aren't downloaded. It takes no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Return zeros in the shape of the values at `indices`."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)[indices]


def make_blank_data(sizes: Facts, class_names: tuple[str, ...]) -> RawData:
    """Make splits of zeros: images, uint8 (n, height, width, channels), and labels, int32 (n,)."""
    train, evaluated = (
        Split(
            {
                "image": BlankColumn((samples, *sizes.image), np.dtype(np.uint8)),
                "label": BlankColumn((samples,), np.dtype(np.int32)),
            }
        )
        for samples in (sizes.train_size, sizes.eval_size)
    )
    return RawData(train, evaluated, Targets(class_names))
