"""The op that converts encoded rows of a table to a network's inputs."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np

from pipeline.core.registry import Seq
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp
from pipeline.data.table import FittedTable

TableInput = Literal["features", "fields", "rows"]
FIELD_COLUMNS = ("field_index", "field_value")
"""Columns of `reads: fields`."""


@dataclass(frozen=True)
class TableLayout:
    """The columns of an encoded row."""

    numbers: int
    """The number of columns of numbers, which precede columns of categories."""
    categories: tuple[int, ...]
    """The number of values of each column of categories."""

    @property
    def features(self) -> int:
        """The number of features: columns of numbers, and the values of all categories."""
        return self.numbers + sum(self.categories)


class EncodeTable(MapOp):
    """Convert encoded rows of `FittedTable`, (batch, columns), to the inputs of a network.

    features: the column `features`, float32 (batch, features), with the numbers, then a one-hot
    vector for each column of categories.
    fields, for wide_deep: for each column of the table the index of a feature, `field_index` int32
    (batch, columns), and the feature's value, `field_value` float32 (batch, columns), which is the
    number, or 1 for a category.
    rows, for table: the encoded row, unchanged.
    A category of position 0, which the training split lacks, is zeros in both.
    """

    name: Literal["encode_table"] = "encode_table"
    numbers: int
    """The number of columns of numbers, which precede columns of categories."""
    categories: Seq[int]
    """The number of values of each column of categories."""
    reads: TableInput
    """The kind of input that the network reads."""

    @property
    def table_layout(self) -> TableLayout:
        return TableLayout(self.numbers, self.categories)

    @property
    def columns(self) -> tuple[str, ...]:
        return ("features",)

    @property
    def written(self) -> tuple[str, ...]:
        return FIELD_COLUMNS if self.reads == "fields" else ("features",)

    def outputs(self, values: tuple[ColumnSpec, ...]) -> tuple[ColumnSpec, ...]:
        (row,) = values
        columns = self.numbers + len(self.categories)
        if row.shape != (columns,):
            raise ValueError(f"needs rows of {columns} columns, not {row.shape}")
        if self.reads == "rows":
            return (row,)
        if self.reads == "features":
            return (replace(row, shape=(self.table_layout.features,), dtype="float32"),)
        return ColumnSpec((columns,), "int32"), ColumnSpec((columns,), "float32")

    def map(self, xp: Any, values: tuple[Any, ...], uniforms: Any) -> tuple[Any, ...]:
        (rows,) = values
        if self.reads == "fields":
            sizes = np.array([1] * self.numbers + list(self.categories))
            first = (np.cumsum(sizes) - sizes).astype(np.float32)
            is_category = np.arange(len(sizes)) >= self.numbers
            weights = xp.where(is_category, (rows > 0).astype(np.float32), rows)
            indices = xp.where(is_category, xp.maximum(rows - 1, 0), np.float32(0))
            return (first + indices).astype(np.int32), weights.astype(np.float32)
        if self.reads == "rows" or not self.categories:
            return (rows,)
        column = np.repeat(np.arange(len(self.categories)), self.categories)
        position = np.concatenate([np.arange(1, size + 1) for size in self.categories])
        one_hot = rows[:, self.numbers :][:, column] == position.astype(np.float32)
        return (xp.concatenate([rows[:, : self.numbers], one_hot.astype(np.float32)], axis=1),)


def make_encoding_ops(
    table: FittedTable | None, reads: TableInput, scale: MapOp | None = None
) -> tuple[MapOp, ...]:
    """Return the ops that were fitted on the training split, which precede the recipe's: the
    op that encodes a table for a network, and the one that standardises series."""
    scaling = () if scale is None else (scale,)
    if table is None:
        return scaling
    sizes = tuple(len(column.categories) for column in table.categories)
    encoding = EncodeTable(numbers=table.num_numbers, categories=sizes, reads=reads)
    return (encoding, *scaling)
