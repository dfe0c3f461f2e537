"""Blank columns, and the columns that a network reads by default."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from pipeline.data.columns import BlankColumn, RawData, Split, Targets


def test_blank_column_has_shape_and_dtype_without_memory() -> None:
    column = BlankColumn((1 << 40, 32, 32, 3), np.dtype(np.uint8))
    rows = column[np.array([0, 7, (1 << 40) - 1])]
    assert (rows.shape, rows.dtype, rows.any()) == ((3, 32, 32, 3), np.uint8, False)
    assert column[:].shape == column.shape
    assert column[:].base.nbytes == 1
    assert column[5:9].shape == (4, 32, 32, 3)


def test_first_column_is_read_by_default() -> None:
    columns = {"label": np.zeros(3), "series": np.zeros((3, 8)), "age": np.zeros(3)}
    data = RawData(Split(columns), Split(columns), Targets(("a",)))
    assert data.inputs == ("series",)
    assert replace(data, inputs=("age", "series")).inputs == ("age", "series")
