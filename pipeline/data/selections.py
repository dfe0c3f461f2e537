"""Rules of a recipe's `select`, which select the samples of a split, and files of exclusions."""

from __future__ import annotations

import csv
import hashlib
import io
from array import array
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Literal

import numpy as np
from pydantic import NonNegativeInt, PositiveInt

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.value_text import join_first, show
from pipeline.core.registry import Seq, component
from pipeline.data.columns import (
    DECODING_THREADS,
    Column,
    LazyColumn,
    RawData,
    Split,
    SplitKey,
    resolve_indices,
)
from pipeline.data.dataset_spec import Selection
from pipeline.data.padding.buckets import RaggedColumn
from pipeline.data.row_views import select_samples

CHUNK_SAMPLES = 256
"""Number of samples that `hash_samples` reads at once."""
MOST_LIST_BYTES = 1 << 30
"""Size limit of a file of samples to leave out."""


def apply_selections(selections: Sequence[Selection], raw: RawData, key: SplitKey) -> RawData:
    """Return the data with the selected samples of a split, and a note for each rule. Raises
    ValueError, beginning with the position and name of a rule that fails or selects no sample.
    Raises DataError for a sample that can't be read."""
    for position, selection in enumerate(selections):
        split = raw.train if key == "train" else raw.eval
        place = f"select.{position} ({selection.name})"
        try:
            selected = np.asarray(selection.select(split, raw))
            if selected.size and (selected.ndim != 1 or selected.dtype.kind not in "biu"):
                raise ValueError(
                    f"returned {selected.dtype}{list(selected.shape)}; must be whole numbers or "
                    "bools, (samples,)"
                )
            rows = resolve_indices(selected, len(split))
        except DataError:
            raise
        except ValueError as error:
            raise ValueError(f"{place}: {error}") from error
        except Exception as error:  # of a custom rule
            raise ValueError(f"{place}: {type(error).__name__}: {error}") from error
        if not len(rows):
            raise ValueError(f"{place}: leaves none of {len(split):,} samples")
        note = f"{key}.{place}: {len(rows):,} of {len(split):,} {raw.unit.samples}"
        targets = raw.targets if key == "train" else replace(raw.targets, naive_mae=None)
        raw = replace(raw, targets=targets, notes=(*raw.notes, note))
        raw = raw.with_split(key, select_samples(split, rows))
    return raw


def exclude_samples(raw: RawData, file: Path, samples: int) -> RawData:
    """Return the data without the training samples that a file lists, and a note about the others.

    The file is a CSV with a column `index`, or has a number on each line. A sample's number is its
    row in the training split as it was read, 0 to `samples` - 1. Raises ValueError, beginning with
    the file, for other numbers, if no sample is left, and if the file can't be read.
    """
    split = raw.train
    numbers = split.list_rows()
    excluded = _read_numbers(file)
    if excluded.max() >= samples:
        raise ValueError(
            f"{file}: {excluded.max()}: must be the number of a sample, 0 to {samples - 1}"
        )
    rows = np.flatnonzero(~np.isin(numbers, excluded))
    if not len(rows):
        raise ValueError(
            f"{file}: names all {len(split):,} samples; keep the lines of those to leave out"
        )
    note = f"exclude: {len(rows):,} of {len(split):,} training {raw.unit.samples} are left"
    return replace(raw, train=select_samples(split, rows), notes=(*raw.notes, note))


def _read_numbers(file: Path) -> np.ndarray:
    """Return the numbers that a file lists, int64 (n,). Raises ValueError, beginning with the file,
    if it can't be read, lists none, or has other values."""
    numbers = array("q")
    column: int | None = None
    try:
        text = read_text(file, MOST_LIST_BYTES).removeprefix("\ufeff")
        reader = csv.reader(io.StringIO(text, newline=""))
        rows = ([cell.strip() for cell in row] for row in reader if row)
        for position, cells in enumerate(rows):
            place = f"line {reader.line_num}"
            if position == 0 and "index" in cells:
                column = cells.index("index")
                continue
            if len(cells) > 1 and column is None:
                raise ValueError(
                    f"{place}: has {len(cells)} values; must have the number of one training "
                    "sample, or the table a column index"
                )
            cell = column or 0
            number = cells[cell] if len(cells) > cell else ""
            if not (number.isascii() and number.isdigit() and len(number) < 10):
                raise ValueError(
                    f"{place}: {show(number)}: must be the number of a training sample; a table "
                    "needs a column index"
                )
            numbers.append(int(number))
    except OSError as error:
        raise ValueError(f"{file}: can't be read: {error.strerror}") from error
    except (ValueError, csv.Error) as error:
        raise ValueError(f"{file}: {error}") from error
    if not numbers:
        raise ValueError(f"{file}: names no sample")
    return np.array(numbers, np.int64)


@component("selection")
class SkipFirst(Selection):
    """All samples but the first ones."""

    name: Literal["skip"] = "skip"
    samples: NonNegativeInt

    def select(self, split: Split, raw: RawData) -> np.ndarray:
        return np.arange(self.samples, len(split))


@component("selection")
class TakeFirst(Selection):
    """The first samples, or all if there are fewer."""

    name: Literal["take"] = "take"
    samples: PositiveInt

    def select(self, split: Split, raw: RawData) -> np.ndarray:
        return np.arange(min(self.samples, len(split)))


@component("selection")
class Classes(Selection):
    """The samples of some classes. Labels and outputs of the network still have all classes."""

    name: Literal["classes"] = "classes"
    keep: Seq[str | int]
    """The names of classes, or their numbers from 0 on."""

    def select(self, split: Split, raw: RawData) -> np.ndarray:
        labels = split.columns.get("label")
        if raw.targets.task != "classification" or labels is None or len(labels.shape) != 1:
            raise ValueError("classes: needs samples of one class each")
        numbers = {name: number for number, name in enumerate(raw.classes)}
        classes = []
        for key in self.keep:
            number = numbers.get(key, -1) if isinstance(key, str) else key
            if not 0 <= number < len(numbers):
                names = join_first(raw.classes, 10)
                raise ValueError(f"keep = {key!r:.60}: there is no such class; they are {names}")
            classes.append(number)
        return np.flatnonzero(np.isin(labels[:], classes))


@component("selection")
class Readable(Selection):
    """The samples that can be read. Before training, each sample is read once."""

    name: Literal["readable"] = "readable"

    def select(self, split: Split, raw: RawData) -> np.ndarray:
        mask = np.ones(len(split), bool)
        for column in split.columns.values():
            if isinstance(column, LazyColumn | RaggedColumn):
                read = column.value if isinstance(column, RaggedColumn) else column.sample
                with ThreadPoolExecutor(DECODING_THREADS) as pool:
                    mask &= list(pool.map(partial(_can_read, read), range(len(split))))
        return np.flatnonzero(mask)


@component("selection")
class Unique(Selection):
    """Of samples that are equal byte for byte, the first. Before training, all are read once."""

    name: Literal["unique"] = "unique"
    column: str | None = None
    """The column by which samples are compared; null: the first that networks read."""
    apart: bool = False
    """Whether evaluation samples that also are in the training split are left out too."""

    def select(self, split: Split, raw: RawData) -> np.ndarray:
        column = self.column or raw.inputs[0]
        if column not in split.columns:
            raise ValueError(f"column = {column}: there is no such column")
        seen: set[bytes] = set()
        if self.apart and split is not raw.train:
            seen.update(hash_samples(raw.train.columns[column]))
        rows = []
        for row, digest in enumerate(hash_samples(split.columns[column])):
            if digest not in seen:
                seen.add(digest)
                rows.append(row)
        return np.array(rows, np.int64)


def _can_read(read: Callable[[int], object], row: int) -> bool:
    try:
        read(row)
    except DataError:
        return False
    return True


def hash_samples(column: Column) -> Iterator[bytes]:
    """Yield a hash of each sample's shape and values, in order."""
    for first in range(0, column.shape[0], CHUNK_SAMPLES):
        rows = np.arange(first, min(first + CHUNK_SAMPLES, column.shape[0]))
        if isinstance(column, RaggedColumn):
            values: Sequence[np.ndarray] = [column.value(row) for row in rows.tolist()]
        else:
            values = list(column[rows])
        for value in values:
            content = np.ascontiguousarray(value).tobytes()
            yield hashlib.blake2b(repr(value.shape).encode() + content, digest_size=16).digest()
