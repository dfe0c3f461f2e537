"""Columns of values that differ in size, and their padding to one size or to buckets."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol, runtime_checkable

import numpy as np

from pipeline.data.columns import Column, name_sample, read_sample, resolve_indices

Bucket = tuple[int, ...]
"""The leading dimensions that values are padded to: (tokens,) or (height, width)."""
SIZE = "size"
"""Name of the column of the sizes of samples without padding, int32 (samples, dimensions)."""


@dataclass(frozen=True)
class Padding:
    """The sizes that samples are padded to, the smallest first; none if all have one size.

    With `has_mask` the network reads what is padding: images get one more channel, 1 inside of the
    image and 0 on padding, and tokens a mask.
    """

    buckets: tuple[Bucket, ...] = ()
    has_mask: bool = False
    column: str = "label"
    """The column of samples that is padded, beside the labels of their positions."""

    @property
    def columns(self) -> tuple[str, ...]:
        """Names of the columns that are padded."""
        return tuple(dict.fromkeys((self.column, "label")))


NO_PADDING = Padding()


@runtime_checkable
class RaggedColumn(Column, Protocol):
    """A column whose values differ in their leading dimensions. Indexing pads the values with zeros
    to the maximum along each dimension."""

    @property
    def sizes(self) -> np.ndarray:
        """The leading dimensions of each value, int32 (samples, dimensions)."""

    @property
    def trailing(self) -> tuple[int, ...]:
        """The other dimensions of a value, which are the same for all values."""

    def value(self, index: int) -> np.ndarray:
        """Return one value, (*sizes[index], *trailing). Raises DataError if it can't be read."""

    def sample_name(self, index: int) -> str:
        """Return the name of a sample for messages."""


class Ragged:
    """Base of the ragged columns, with shape and indexing computed from `sizes` and `trailing`."""

    @property
    def shape(self: RaggedColumn) -> tuple[int, ...]:
        """(samples, *maximum of the sizes along each dimension, *trailing)."""
        return (len(self.sizes), *compute_canvas(self.sizes), *self.trailing)

    def __getitem__(self: RaggedColumn, indices: Any) -> np.ndarray:
        """Return the values at an integer array of sample indices, or at a slice, padded."""
        return PaddedColumn(self, compute_canvas(self.sizes))[indices]


@dataclass(frozen=True)
class RaggedArray(Ragged):
    """A ragged column in memory. All values are one after the other in `flat`, (numbers,)."""

    flat: np.ndarray
    starts: np.ndarray
    """The index in `flat` of each value's first number, int64 (samples,)."""
    sizes: np.ndarray
    trailing: tuple[int, ...]

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.flat.dtype

    def value(self, index: int) -> np.ndarray:
        shape = (*self.sizes[index].tolist(), *self.trailing)
        start = int(self.starts[index])
        return self.flat[start : start + math.prod(shape)].reshape(shape)

    def sample_name(self, index: int) -> str:
        return f"sample {index}"


def make_ragged_array(
    flat: np.ndarray, sizes: np.ndarray, trailing: tuple[int, ...] = ()
) -> RaggedArray:
    """Make a ragged column of `flat` (numbers,) and `sizes` (samples, dimensions). Raises
    ValueError for sizes that aren't positive integers or don't fit `flat`."""
    if sizes.ndim != 2 or sizes.dtype.kind not in "iu" or sizes.size == 0:
        raise ValueError(f"sizes are {sizes.dtype} {sizes.shape}; must be whole numbers (n, d)")
    if sizes.min() < 1:
        raise ValueError(f"sizes go down to {sizes.min()}; must be at least 1")
    lengths = sizes.astype(np.int64).prod(axis=1) * math.prod(trailing)
    if flat.shape != (lengths.sum(),):
        raise ValueError(f"values have shape {flat.shape}; the sizes ask for ({lengths.sum()},)")
    starts = np.concatenate([[0], np.cumsum(lengths)[:-1]])
    return RaggedArray(flat, starts, sizes.astype(np.int32), trailing)


@dataclass(frozen=True)
class UniformColumn(Ragged):
    """A ragged column of the values of another column, whose sizes are equal."""

    column: Column
    dimensions: int
    """The number of leading dimensions of a value that are its size."""

    @property
    def sizes(self) -> np.ndarray:
        leading = self.column.shape[1 : 1 + self.dimensions]
        return np.tile(np.array(leading, np.int32), (self.column.shape[0], 1))

    @property
    def trailing(self) -> tuple[int, ...]:
        return tuple(self.column.shape[1 + self.dimensions :])

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.column.dtype

    def value(self, index: int) -> np.ndarray:
        return read_sample(self.column, index)

    def sample_name(self, index: int) -> str:
        return name_sample(self.column, index)


def to_ragged(column: Column, dimensions: int) -> RaggedColumn:
    """Return a column as a ragged column, with `dimensions` leading dimensions that may differ."""
    return column if isinstance(column, RaggedColumn) else UniformColumn(column, dimensions)


@dataclass(frozen=True)
class PaddedColumn:
    """A `LazyColumn` of a ragged column's values, padded with `fill` to the size `bucket`."""

    values: RaggedColumn
    bucket: Bucket
    fill: int = 0

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.values.dtype

    @property
    def shape(self) -> tuple[int, ...]:
        """(samples, *bucket, *trailing)."""
        return (len(self.values.sizes), *self.bucket, *self.values.trailing)

    def __getitem__(self, indices: Any) -> np.ndarray:
        rows = resolve_indices(indices, len(self.values.sizes)).tolist()
        padded = np.full((len(rows), *self.shape[1:]), self.fill, self.dtype)
        for position, index in enumerate(rows):
            value = self.values.value(index)
            leading = value.shape[: len(self.bucket)]
            padded[position][tuple(slice(length) for length in leading)] = value
        return padded

    def sample(self, index: int) -> np.ndarray:
        return self[np.array([index])][0]

    def sample_name(self, index: int) -> str:
        return self.values.sample_name(index)


def sort_buckets(buckets: Sequence[Bucket]) -> tuple[Bucket, ...]:
    """Return the buckets in ascending order of their number of positions."""
    return tuple(sorted(map(tuple, buckets), key=lambda bucket: (math.prod(bucket), bucket)))


def assign_buckets(
    sizes: np.ndarray, buckets: Sequence[Bucket], *, crop: bool = False
) -> np.ndarray:
    """Return the number of the first bucket that covers each sample, int32 (samples,). `sizes` are
    the sizes of the samples, (samples, dimensions). With `crop`, a sample that no bucket covers has
    the bucket that covers most of it. Without `crop`, raises ValueError for such a sample."""
    bounds = np.array(buckets)
    is_covered = np.all(sizes[:, None] <= bounds, axis=-1)  # (samples, buckets)
    is_oversized = ~is_covered.any(axis=1)
    if is_oversized.any() and not crop:
        largest = sizes[is_oversized].max(axis=0).tolist()
        raise ValueError(
            f"{is_oversized.sum():,} of {len(sizes):,} samples are larger than every bucket; "
            f"a bucket of {largest} would hold them; dataset.oversized=crop uses a part of each"
        )
    areas = np.minimum(sizes[:, None], bounds).astype(np.int64).prod(axis=-1)
    numbers = np.where(is_oversized, areas.argmax(axis=1), is_covered.argmax(axis=1))
    return numbers.astype(np.int32)


def require_used_buckets(numbers: np.ndarray, buckets: Sequence[Bucket], batch_size: int) -> None:
    """Raise ValueError for a bucket with fewer than `batch_size` samples. `numbers` has the number
    of each sample's bucket, int (samples,)."""
    counts = np.bincount(numbers, minlength=len(buckets)).tolist()
    for bucket, count in zip(buckets, counts, strict=True):
        if count == 0:
            raise ValueError(f"{list(bucket)} covers no sample that a smaller one does not cover")
        if count < batch_size:
            raise ValueError(
                f"{list(bucket)} has {count} samples, too few for a batch of {batch_size}, so that "
                "drop_remainder would drop all of them"
            )


def compute_canvas(sizes: np.ndarray | Sequence[Bucket]) -> Bucket:
    """Return the smallest size that holds all sizes or buckets: the maximum of each dimension."""
    return tuple(np.asarray(sizes).max(axis=0).tolist())
