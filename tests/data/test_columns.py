"""Blank data: the shapes and types of data that is not there."""

from __future__ import annotations

import numpy as np

from pipeline.data.columns import BlankColumn, ColumnSpec, Facts, make_blank_data


def test_blank_column_has_shape_and_dtype_without_memory() -> None:
    column = BlankColumn((1 << 40, 32, 32, 3), np.dtype(np.uint8))
    rows = column[np.array([0, 7, (1 << 40) - 1])]
    assert (rows.shape, rows.dtype, rows.any()) == ((3, 32, 32, 3), np.uint8, False)
    assert column[:].shape == column.shape
    assert column[:].base.nbytes == 1
    assert column[5:9].shape == (4, 32, 32, 3)


def test_blank_data_has_the_sizes_and_names_of_a_source() -> None:
    data = make_blank_data(Facts((28, 20, 1), 2, 60, 10), ("cat", "dog"))
    assert (len(data.train), len(data.eval), data.classes) == (60, 10, ("cat", "dog"))
    expected = {"image": ColumnSpec((28, 20, 1), "uint8"), "label": ColumnSpec((), "int32")}
    assert data.train.specs() == data.eval.specs() == expected
