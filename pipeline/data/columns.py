"""Raw data: two splits of named columns of equal length, and the targets of a network among them:
classes, numbers, labels or the next token."""

from __future__ import annotations

import math
import os
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal, Protocol, runtime_checkable

import numpy as np

from pipeline.core.registry import MAX_FLOAT
from pipeline.data.table import FittedTable

if TYPE_CHECKING:
    from pipeline.data.audio import AudioFormat
    from pipeline.data.series.series_columns import ScaleSeries
    from pipeline.data.text.text_format import TextFormat

BOXES = "boxes"
"""Column with the bounding boxes of an image, float32 (n, boxes, 4): the shares of height and width
at which a box has its top, left, bottom and right."""
SplitKey = Literal["train", "eval"]
DECODING_THREADS = min(8, os.cpu_count() or 1)
"""Threads that read the samples of a `LazyColumn`."""


class Column(Protocol):
    """One value per sample: a numpy array, or an object that decodes values on demand."""

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
    """A column whose samples are slow to read. Several threads read them, each one at a time."""

    def sample(self, index: int) -> np.ndarray:
        """Return the value of a sample. Raises DataError if it can't be read."""

    def sample_name(self, index: int) -> str:
        """Return the name of a sample for messages, such as its file."""

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Read the values at an array of indices or at a slice, in several threads."""
        rows = resolve_indices(indices, self.shape[0])
        values = np.empty((len(rows), *self.shape[1:]), self.dtype)
        with ThreadPoolExecutor(DECODING_THREADS) as pool:
            for position, value in enumerate(pool.map(self.sample, rows)):
                values[position] = value
        return values


@runtime_checkable
class BatchedColumn(LazyColumn, Protocol):
    """A column that reads many samples at once faster than one at a time."""

    def read_into(self, indices: np.ndarray, out: np.ndarray) -> None:
        """Read the samples at indices, int (n,), into `out`, (n, *shape of one value). Raises
        DataError if a sample can't be read."""


def resolve_indices(indices: Any, samples: int) -> np.ndarray:
    """Convert an array of indices, a bool mask (samples,) or a slice to indices >= 0, int64 (n,).
    Raises IndexError for an index out of range, and for a mask of another shape."""
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


@dataclass(frozen=True)
class ColumnSpec:
    """Shape and dtype of one value of a column."""

    shape: tuple[int, ...]
    dtype: str
    layout: Literal["hwc", "chw"] = "hwc"
    """The order of an image's axes, which `hwc2chw` changes."""


def describe_column(column: Column) -> ColumnSpec:
    """Return the shape and dtype of one value."""
    return ColumnSpec(tuple(column.shape[1:]), np.dtype(column.dtype).name)


@dataclass(frozen=True)
class Split:
    """The training or evaluation split of a dataset, before map ops: columns of equal length."""

    columns: Mapping[str, Column]
    files: tuple[int, ...] = ()
    """Number of samples in each file, in the order of samples; empty if unknown."""
    padding: int = 0
    """Number of rows of zeros to add after the samples on a device, so that folds of different
    sizes share a program. No step reads them."""
    original_rows: np.ndarray | None = None
    """Row of each sample in the split as it was read, int64 (n,); None: 0 to n - 1."""
    locate: Callable[[int], str] | None = None
    """Function that returns the place of a row of the split as it was read, such as "rows.csv, line
    2"; None: unknown, or the columns name their samples."""

    def __len__(self) -> int:
        # A custom dataset may break the rule that all columns are equally long.
        return min(column.shape[0] for column in self.columns.values())

    def list_rows(self) -> np.ndarray:
        """Return the row of each sample in the split as it was read, int64 (n,)."""
        return np.arange(len(self)) if self.original_rows is None else self.original_rows

    @property
    def sample_bytes(self) -> int:
        """Bytes of one sample before map ops, in all columns."""
        return sum(
            math.prod(column.shape[1:]) * np.dtype(column.dtype).itemsize
            for column in self.columns.values()
        )

    def specs(self) -> dict[str, ColumnSpec]:
        """Return the shape and dtype of one value, by column."""
        return {name: describe_column(column) for name, column in self.columns.items()}


@dataclass(frozen=True)
class SampleUnit:
    """The words for samples, and for the unit of speed, in the log."""

    samples: str = "images"
    """The word for samples: images, rows, windows or texts."""
    speed_unit: str = "images"
    """The items of which the log has the number per second, such as tokens."""
    per_sample: int = 1
    """The number of such items in a sample."""
    size: str | None = None
    """Size of a sample in words, such as "of 128 tokens"; None: the log has the sample's shape."""


IMAGES = SampleUnit()


@dataclass(frozen=True)
class RawData:
    """Data of a source: both splits, and the targets."""

    train: Split
    eval: Split
    targets: Targets
    table: FittedTable | None = None
    """How the columns of a table were encoded; None: not a table. The encoded rows are the column
    `features` of the splits."""
    unit: SampleUnit = IMAGES
    text: TextFormat | None = None
    """The tokenizer of texts and the kind of prediction from them; None for other samples."""
    audio: AudioFormat | None = None
    """Rate and length of sound; None for other samples."""
    inputs: tuple[str, ...] = ()
    """Columns that a network reads unless it declares others, the padded one first. By default the
    first column."""
    scale: ScaleSeries | None = None
    """How series are standardised; None: they aren't, or there are none."""
    notes: tuple[str, ...] = ()
    """Lines for the log about the data, such as files that were left out."""

    def __post_init__(self) -> None:
        if not self.inputs:
            first = next(name for name in self.train.columns if name != "label")
            object.__setattr__(self, "inputs", (first,))

    def with_split(self, key: SplitKey, split: Split) -> RawData:
        """Return the data with another training or evaluation split."""
        return replace(self, train=split) if key == "train" else replace(self, eval=split)

    @property
    def classes(self) -> tuple[str, ...]:
        """The names of the network's outputs, in their order: classes, numbers or labels."""
        return self.targets.names


@dataclass(frozen=True)
class BlankColumn:
    """Column of zeros in place of samples that aren't downloaded. It takes no memory."""

    shape: tuple[int, ...]
    dtype: np.dtype[Any]

    def __getitem__(self, indices: Any) -> np.ndarray:
        """Return zeros in the shape of the values at `indices`."""
        return np.broadcast_to(np.zeros((), self.dtype), self.shape)[indices]


def count_split_bytes(split: Split) -> int:
    """Return the bytes of a split in the dtypes that it was read in."""
    return len(split) * split.sample_bytes


Distribution = Literal["", "poisson", "gamma", "squared_log", "tails"]
"""Distribution of a number that a loss is for; empty: any."""
POSITIVE = ("poisson", "gamma", "squared_log")
"""Distributions of numbers of at least 0."""
Task = Literal["classification", "regression", "multi_label", "next_token", "matching", "sequence"]


@dataclass(frozen=True)
class Targets:
    """The meaning of a network's outputs.

    classification: classes; regression: numbers; multi_label: labels, of which a sample may have
    several or none; next_token: the tokens of a vocabulary; matching: both embeddings of a pair,
    whose label is its number in the split, without names; sequence: symbols, which aren't aligned
    with the outputs at positions, of which the first is the blank. A network is trained on numbers
    that are standardised by the training split, `(number - mean) / std`. Metrics and predictions
    are in the units of the data.
    """

    names: tuple[str, ...]
    """Names of the classes, numbers, labels or tokens, in the order of outputs."""
    task: Task = "classification"
    mean: tuple[float, ...] = ()
    """Mean of each number, in the units of the data; empty for other tasks."""
    std: tuple[float, ...] = ()
    """Standard deviation of each number, in the units of the data; empty for other tasks."""
    counts: tuple[int, ...] = ()
    """Number of training labels of each class; empty unless the loss depends on them."""
    naive_mae: float | None = None
    """Mean absolute error of a naive forecast of the evaluation samples, in the data's units; None:
    there is none, or other samples are evaluated."""
    distribution: Distribution = ""
    """Distribution of the numbers, if the loss depends on it."""

    @property
    def is_positive(self) -> bool:
        """Whether the numbers are at least 0, with a mean above 0, so that a network may predict
        them by an exponential."""
        return self.distribution in POSITIVE

    def with_distribution(self, distribution: Distribution) -> Targets:
        """Return the targets with another distribution."""
        return replace(self, distribution=distribution)

    def to_dict(self) -> dict[str, Any]:
        """Return task, mean, standard deviation and a known distribution as JSON values."""
        known = {"distribution": self.distribution} if self.distribution else {}
        return {"task": self.task, "mean": list(self.mean), "std": list(self.std), **known}

    def to_data_units(self, outputs: np.ndarray) -> np.ndarray:
        """Return outputs (..., K) in the units of the data. Only regression changes them."""
        if self.task != "regression":
            return outputs
        return outputs * np.asarray(self.std) + np.asarray(self.mean)

    def __len__(self) -> int:
        return len(self.names)

    def __str__(self) -> str:
        count = len(self.names)
        match self.task:
            case "classification":
                return f"{count} classes"
            case "multi_label":
                return f"{count} labels"
            case "matching":
                return "pairs to match"
            case "sequence":
                return f"sequences of {count - 1} symbols"
            case "next_token":
                return f"{count:,} different tokens"
        first_numbers = ", ".join(
            f"{name} {mean:.4g} +- {std:.4g}"
            for name, mean, std in zip(self.names[:4], self.mean, self.std, strict=False)
        )
        plural = "s" if count > 1 else ""
        more = ", ..." if count > 4 else ""
        return f"{count} number{plural} ({first_numbers}{more})"


def require_trained_range(train: np.ndarray, evaluated: np.ndarray) -> None:
    """Raise ValueError if a label of the evaluation split is above all of the training split, which
    define the classes. Both are int (n,), not empty."""
    last = int(train.max())
    highest = int(evaluated.max())
    if highest > last:
        raise ValueError(
            f"the evaluation split has the label {highest}, and the training split has labels from "
            f"{int(train.min())} to {last}; a class without training samples can't be learned; "
            "correct the labels, or set dataset.classes to evaluate it all the same"
        )


def make_number_targets(
    train: np.ndarray, evaluated: np.ndarray, names: tuple[str, ...], task: Task
) -> tuple[np.ndarray, np.ndarray, Targets]:
    """Return the numbers of both splits, (n, K), as float32, and their targets. For a regression
    they are standardised by the training split. Raises ValueError for numbers that aren't finite in
    float32, also once they are standardised, and if all training numbers of a column are equal."""
    if task != "regression":
        return train.astype(np.float32), evaluated.astype(np.float32), Targets(names, task)
    for split_name, values in (("training", train), ("evaluation", evaluated)):
        is_finite = (np.abs(values) <= MAX_FLOAT).all(axis=0)
        if not is_finite.all():
            column = names[int(np.flatnonzero(~is_finite)[0])]
            raise ValueError(
                f"{column} has values in the {split_name} split that are not finite in float32"
            )
    splits = [np.asarray(values, np.float64) for values in (train, evaluated)]
    mean, std = splits[0].mean(axis=0), splits[0].std(axis=0)
    # The computed deviation of equal numbers such as 0.1 isn't always 0.
    is_constant = (std == 0) | (train == train[:1]).all(axis=0)
    constant = [name for name, is_equal in zip(names, is_constant, strict=True) if is_equal]
    if constant:
        raise ValueError(f"{', '.join(constant)} is the same in all training samples")
    targets = Targets(names, "regression", tuple(mean.tolist()), tuple(std.tolist()))
    with np.errstate(over="ignore"):
        scaled = [((values - mean) / std).astype(np.float32) for values in splits]
    overflows = ~np.isfinite(scaled[1]).all(axis=0)
    if overflows.any():
        column = names[int(np.flatnonzero(overflows)[0])]
        raise ValueError(
            f"{column} has values in the evaluation split that overflow, divided by the standard "
            "deviation of the training split"
        )
    return scaled[0], scaled[1], targets
