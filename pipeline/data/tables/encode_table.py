"""The op that converts encoded rows of a table to a network's input."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal

import numpy as np

from pipeline.core.registry import Seq
from pipeline.data.columns import ColumnSpec
from pipeline.data.dataset_spec import MapOp, Op
from pipeline.data.table import FittedTable

TableInput = Literal["features", "fields"]


class EncodeTable(Op):
    """Convert encoded rows of `FittedTable`, (batch, columns), to the input of a network, float32.

    features: (batch, features), the numbers, then a one-hot vector for each column of categories.
    fields, for wide_deep: (batch, columns, 1, 2), the index of a feature for each column, and the
    feature's value, which is the number, or 1 for a category. A category of position 0, which the
    training split lacks, is zeros in both.
    """

    name: Literal["encode_table"] = "encode_table"
    numbers: int
    """The number of columns of numbers, which precede columns of categories."""
    categories: Seq[int]
    """The number of values of each column of categories."""
    reads: TableInput
    """The kind of input that the network reads."""

    @property
    def features(self) -> int:
        """The number of features. Each column of numbers is a feature, and each category."""
        return self.numbers + sum(self.categories)

    def output(self, value: ColumnSpec) -> ColumnSpec:
        columns = self.numbers + len(self.categories)
        if value.shape != (columns,):
            raise ValueError(f"needs rows of {columns} columns, not {value.shape}")
        shape = (self.features,) if self.reads == "features" else (columns, 1, 2)
        return replace(value, shape=shape, dtype="float32")

    def __call__(self, xp: Any, values: Any, uniforms: Any) -> Any:
        if self.reads == "fields":
            sizes = np.array([1] * self.numbers + list(self.categories))
            first = (np.cumsum(sizes) - sizes).astype(np.float32)
            is_category = np.arange(len(sizes)) >= self.numbers
            weights = xp.where(is_category, (values > 0).astype(np.float32), values)
            indices = xp.where(is_category, xp.maximum(values - 1, 0), np.float32(0))
            return xp.stack([first + indices, weights], axis=-1)[:, :, None, :].astype(np.float32)
        if not self.categories:
            return values
        column = np.repeat(np.arange(len(self.categories)), self.categories)
        position = np.concatenate([np.arange(1, size + 1) for size in self.categories])
        one_hot = values[:, self.numbers :][:, column] == position.astype(np.float32)
        return xp.concatenate([values[:, : self.numbers], one_hot.astype(np.float32)], axis=1)


def make_encoding_ops(table: FittedTable | None, reads: TableInput) -> tuple[EncodeTable, ...]:
    """Return a tuple of the op that encodes a table for a network; () without a table."""
    if table is None:
        return ()
    sizes = tuple(len(column.categories) for column in table.categories)
    return (EncodeTable(numbers=table.num_numbers, categories=sizes, reads=reads),)


def count_encoded_features(ops: Sequence[MapOp]) -> int | None:
    """Return the number of features if the first op encodes a table, else None."""
    return ops[0].features if ops and isinstance(ops[0], EncodeTable) else None
