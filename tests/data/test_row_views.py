"""Views of rows are equal to the rows of the columns, for every kind of column."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.columns import BatchedColumn, LazyColumn, Split
from pipeline.data.padding.buckets import RaggedColumn, make_ragged_array
from pipeline.data.row_views import find_place, join_splits, select_samples
from tests.slow_cases import mark_slow_except

VALUES = np.arange(7 * 6, dtype=np.int32).reshape(7, 2, 3)


@dataclass(frozen=True)
class Lazy(LazyColumn):
    values: np.ndarray
    dtype = np.dtype(np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def sample(self, index: int) -> np.ndarray:
        return self.values[index]

    def sample_name(self, index: int) -> str:
        return f"file {index}"


class Batched(Lazy):
    def read_into(self, indices: np.ndarray, out: np.ndarray) -> None:
        out[:] = self.values[indices]


@dataclass(frozen=True)
class Plain:
    values: np.ndarray
    dtype = np.dtype(np.int32)

    @property
    def shape(self) -> tuple[int, ...]:
        return self.values.shape

    def __getitem__(self, indices: Any) -> np.ndarray:
        return self.values[indices]


KINDS: tuple[Any, ...] = (np.asarray, Plain, Lazy, Batched)
Rows = st.lists(st.integers(0, 6), min_size=1, max_size=9)


@pytest.mark.medium
@pytest.mark.parametrize("kind", mark_slow_except([np.asarray, Lazy], KINDS))
@given(rows=Rows, positions=st.lists(st.integers(-1, 0), max_size=4))
def test_selected_rows_are_read(kind: Any, rows: list[int], positions: list[int]) -> None:
    column = select_samples(Split({"x": kind(VALUES)}), np.array(rows)).columns["x"]
    np.testing.assert_array_equal(column[:], VALUES[rows])
    np.testing.assert_array_equal(column[np.array(positions, int)], VALUES[rows][positions])
    if isinstance(column, BatchedColumn):
        name = "file" if isinstance(kind(VALUES), LazyColumn) else "sample"
        assert column.sample_name(0) == f"{name} {rows[0]}"
        np.testing.assert_array_equal(column.sample(0), VALUES[rows[0]])
        out = np.empty((1, 2, 3), np.int32)
        column.read_into(np.array([len(rows) - 1]), out)
        np.testing.assert_array_equal(out[0], VALUES[rows[-1]])


@pytest.mark.parametrize("first", KINDS)
@pytest.mark.parametrize("second", KINDS)
def test_joined_columns_are_read(first: Any, second: Any) -> None:
    parts = [Split({"x": first(VALUES)}), Split({"x": second(VALUES[:3] + 100)})]
    joined = join_splits(parts)
    expected = np.concatenate([VALUES, VALUES[:3] + 100])
    np.testing.assert_array_equal(joined.columns["x"][:], expected)
    np.testing.assert_array_equal(joined.columns["x"][np.array([8, 1])], expected[[8, 1]])
    assert joined.files == (7, 3)


def test_ragged_columns_are_selected_and_joined() -> None:
    ragged = make_ragged_array(np.arange(11), np.array([[2], [5], [4]]))
    view = select_samples(Split({"x": ragged}), np.array([2, 0])).columns["x"]
    assert isinstance(view, RaggedColumn)
    assert view.sizes.tolist() == [[4], [2]]
    assert view.value(0).tolist() == [7, 8, 9, 10]
    assert view[:].tolist() == [[7, 8, 9, 10], [0, 1, 0, 0]]
    joined = join_splits([Split({"x": ragged}), Split({"x": np.ones((2, 3), int)})]).columns["x"]
    assert isinstance(joined, RaggedColumn)
    assert joined.value(4).tolist() == [1, 1, 1]
    assert joined.sample_name(1) == "sample 1"


def test_samples_per_file_are_counted_if_files_are_read_in_order() -> None:
    split = Split({"x": VALUES}, files=(2, 0, 5))
    assert select_samples(split, np.array([1, 2, 6])).files == (1, 0, 2)
    assert select_samples(split, np.array([2, 1])).files == ()


def test_incompatible_columns_are_refused() -> None:
    with pytest.raises(ValueError, match=r"x is int32 of shape .* and int64 of shape"):
        join_splits([Split({"x": VALUES}), Split({"x": VALUES.astype(np.int64)})])
    with pytest.raises(ValueError, match="the columns are x and y; must be equal"):
        join_splits([Split({"x": VALUES}), Split({"y": VALUES})])


def test_selected_samples_keep_their_places() -> None:
    split = Split({"x": np.arange(6)}, files=(4, 2), padding=3, locate="line {}".format)
    selected = select_samples(select_samples(split, np.array([5, 3, 1])), np.array([2, 0]))
    assert selected.locate is not None
    assert [selected.locate(row) for row in selected.list_rows().tolist()] == ["line 1", "line 5"]
    assert selected.padding == 0


def test_place_is_the_file_of_any_column() -> None:
    ragged = make_ragged_array(np.arange(7), np.ones((7, 1), int))
    assert find_place(Split({"tokens": ragged, "image": Lazy(VALUES)}), 3) == "file 3"
    assert find_place(Split({"tokens": ragged}), 3) == ""
