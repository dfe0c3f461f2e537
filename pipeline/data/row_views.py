"""Columns that view rows of other columns, to select samples and to join datasets."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np

from pipeline.data.columns import (
    Column,
    LazyColumn,
    Split,
    name_sample,
    read_sample,
    resolve_indices,
)
from pipeline.data.padding.buckets import Ragged, RaggedColumn, to_ragged


@dataclass(frozen=True)
class RowView:
    """A `BatchedColumn` of rows of other columns, which have equal shapes and dtypes of values."""

    columns: Sequence[Any]
    column_ids: np.ndarray
    """The index in `columns` of each sample's column, int64 (n,)."""
    rows: np.ndarray
    """The row of each sample in its column, int64 (n,)."""

    @property
    def shape(self) -> tuple[int, ...]:
        return (len(self.rows), *self.columns[0].shape[1:])

    @property
    def dtype(self) -> np.dtype[Any]:
        return np.dtype(self.columns[0].dtype)

    def __getitem__(self, indices: Any) -> np.ndarray:
        positions = resolve_indices(indices, len(self.rows))
        out = np.empty((len(positions), *self.shape[1:]), self.dtype)
        self.read_into(positions, out)
        return out

    def read_into(self, indices: np.ndarray, out: np.ndarray) -> None:
        for column_id, column in enumerate(self.columns):
            mask = self.column_ids[indices] == column_id
            if mask.any():
                out[mask] = column[self.rows[indices[mask]]]

    def sample(self, index: int) -> np.ndarray:
        return read_sample(*self.locate(index))

    def sample_name(self, index: int) -> str:
        return name_sample(*self.locate(index))

    def locate(self, index: int) -> tuple[Any, int]:
        """Return the column that has a sample, and the sample's row in it."""
        return self.columns[self.column_ids[index]], int(self.rows[index])


@dataclass(frozen=True)
class RaggedRowView(Ragged):
    """A ragged column of rows of other ragged columns."""

    view: RowView

    @cached_property
    def sizes(self) -> np.ndarray:
        sizes = [column.sizes for column in self.view.columns]
        return RowView(sizes, self.view.column_ids, self.view.rows)[:]

    @property
    def trailing(self) -> tuple[int, ...]:
        return tuple(self.view.columns[0].trailing)

    @property
    def dtype(self) -> np.dtype[Any]:
        return self.view.dtype

    def value(self, index: int) -> np.ndarray:
        column, row = self.view.locate(index)
        return column.value(row)

    def sample_name(self, index: int) -> str:
        column, row = self.view.locate(index)
        return column.sample_name(row)


def select_samples(split: Split, rows: np.ndarray) -> Split:
    """Return a split of the samples at `rows`, int (n,), which keep their numbers."""
    columns: dict[str, Column] = {}
    for name, column in split.columns.items():
        if isinstance(column, np.ndarray):
            columns[name] = column[rows]
        else:
            columns[name] = _make_view([column], np.zeros(len(rows), np.int64), rows)
    files: list[int] = []
    if split.files and (np.diff(rows) > 0).all():
        # In another order the samples of a file aren't consecutive.
        file_bounds = np.cumsum((0, *split.files))
        files = np.diff(np.searchsorted(rows, file_bounds)).tolist()
    numbers = split.list_rows()[rows]
    return replace(split, columns=columns, files=tuple(files), padding=0, original_rows=numbers)


def find_place(split: Split, sample: int) -> str:
    """Return the file of a sample of a split, also with its line; "" if unknown."""
    if split.locate is not None:
        return split.locate(int(split.list_rows()[sample]))
    for column in split.columns.values():
        if isinstance(column, LazyColumn | RaggedColumn):
            name = column.sample_name(sample)
            if not re.fullmatch(r"sample \d+", name):  # the name in a column without files
                return name
    return ""


def join_splits(splits: Sequence[Split]) -> Split:
    """Return the samples of all splits in order. If all splits have files, these are joined, else
    each split is a file. Raises ValueError for different columns, shapes or dtypes."""
    names = [tuple(split.columns) for split in splits]
    if len(set(names)) > 1:
        raise ValueError(f"the columns are {' and '.join(map(', '.join, names))}; must be equal")
    columns = {name: _join([split.columns[name] for split in splits], name) for name in names[0]}
    if all(split.files for split in splits):
        return Split(columns, tuple(count for split in splits for count in split.files))
    return Split(columns, tuple(len(split) for split in splits))


def _join(columns: Sequence[Column], name: str) -> Column:
    """Return a column with the values of all columns in order. It is ragged if one of them is.
    Raises ValueError for columns that differ in shape or dtype."""
    ragged_columns = [column for column in columns if isinstance(column, RaggedColumn)]
    if ragged_columns:
        dimensions = ragged_columns[0].sizes.shape[1]
        columns = [to_ragged(column, dimensions) for column in columns]
    kinds = []
    for column in columns:
        shape = tuple(column.shape[1:])
        if isinstance(column, RaggedColumn):
            shape = column.trailing
        kinds.append(f"{np.dtype(column.dtype).name} of shape {shape}")
    if len(set(kinds)) > 1:
        raise ValueError(f"{name} is {' and '.join(kinds)}; must be the same in all sources")
    arrays = [column for column in columns if isinstance(column, np.ndarray)]
    if len(arrays) == len(columns):
        return np.concatenate(arrays)
    counts = [column.shape[0] for column in columns]
    column_ids = np.repeat(np.arange(len(columns)), counts)
    return _make_view(columns, column_ids, np.concatenate([np.arange(count) for count in counts]))


def _make_view(columns: Sequence[Column], column_ids: np.ndarray, rows: np.ndarray) -> Column:
    """Return a `RowView`, or a `RaggedRowView` of ragged columns."""
    view = RowView(columns, column_ids, rows)
    return RaggedRowView(view) if isinstance(columns[0], RaggedColumn) else view
