"""Values of several sizes: stored one after the other, padded, assigned to buckets (D-18)."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.columns import LazyColumn, Split
from pipeline.data.padding.buckets import (
    SIZE,
    PaddedColumn,
    Padding,
    RaggedColumn,
    assign_buckets,
    make_ragged_array,
    require_used_buckets,
    sort_buckets,
)
from pipeline.data.padding.pad_samples import pad_split
from tests.backends.loading.small_loader import LazyNumbers

SIZES = st.lists(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1, max_size=12)


def values_of(sizes: list[tuple[int, ...]], trailing: tuple[int, ...] = ()) -> list[np.ndarray]:
    """Values that identify their sample and place, none of them 0."""
    return [
        np.arange(math.prod((*size, *trailing)), dtype=np.int32).reshape(*size, *trailing)
        + 1000 * (number + 1)
        for number, size in enumerate(sizes)
    ]


def stored(values: list[np.ndarray], dimensions: int = 2) -> RaggedColumn:
    flat = np.concatenate([value.ravel() for value in values])
    sizes = np.array([value.shape[:dimensions] for value in values])
    return make_ragged_array(flat, sizes, values[0].shape[dimensions:])


@pytest.mark.slow
@given(sizes=SIZES, trailing=st.sampled_from([(), (1,), (3,)]), data=st.data())
def test_padded_values_end_in_zeros(
    sizes: list[tuple[int, ...]], trailing: tuple[int, ...], data: st.DataObject
) -> None:
    values = values_of(sizes, trailing)
    column = PaddedColumn(stored(values), (6, 5))
    assert isinstance(column, LazyColumn)
    assert column.shape == (len(values), 6, 5, *trailing)
    rows = data.draw(st.lists(st.integers(0, len(values) - 1), max_size=8))
    result = column[np.array(rows, int)]
    assert (result.shape, result.dtype) == ((len(rows), 6, 5, *trailing), np.int32)
    for row, padded in zip(rows, result, strict=True):
        height, width = sizes[row]
        assert np.array_equal(padded[:height, :width], values[row])
        assert np.count_nonzero(padded) == values[row].size
        assert np.array_equal(column.sample(row), padded)


def test_ragged_column_pads_to_its_largest() -> None:
    column = stored(values_of([(2, 5), (3, 1)]))
    assert column.shape == (2, 3, 5)
    assert column[:].shape == (2, 3, 5)


@pytest.mark.slow
@given(sizes=SIZES, buckets=st.sets(st.tuples(st.integers(1, 6), st.integers(1, 5)), min_size=1))
def test_sample_is_assigned_to_smallest_covering_bucket(
    sizes: list[tuple[int, ...]], buckets: set[tuple[int, ...]]
) -> None:
    ordered = sort_buckets([*buckets, (6, 5)] if (6, 5) not in buckets else list(buckets))
    volumes = list(map(math.prod, ordered))
    assert volumes == sorted(volumes)
    for size, number in zip(sizes, assign_buckets(np.array(sizes), ordered), strict=True):
        covering = [b for b in ordered if b[0] >= size[0] and b[1] >= size[1]]
        assert math.prod(ordered[number]) == min(map(math.prod, covering))
        assert ordered[number] in covering


def test_samples_larger_than_every_bucket_are_refused() -> None:
    sizes = np.array([[3, 9], [2, 2], [8, 1]])
    with pytest.raises(
        ValueError,
        match=r"^2 of 3 samples are larger than every bucket; a bucket of \[8, 9\] would hold them",
    ):
        assign_buckets(sizes, [(4, 4), (3, 8)])


def test_unused_bucket_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^\[4\] covers no sample that a smaller one does not"):
        require_used_buckets(np.array([0, 2, 2]), [(2,), (4,), (6,)], 1)


def test_bucket_smaller_than_a_batch_is_refused() -> None:
    expected = r"^\[6\] has 2 samples, too few for a batch of 3, so that drop_remainder"
    with pytest.raises(ValueError, match=expected):
        require_used_buckets(np.array([0, 0, 0, 1, 1]), [(2,), (6,)], 3)


def test_fixed_shape_columns_are_padded() -> None:
    """A fixed maximum for any source, lazily read ones included."""
    images = np.arange(1, 2 * 3 * 4 + 1, dtype=np.int32).reshape(2, 3, 4, 1)
    for column in (images, LazyNumbers(images)):
        padding = Padding(((3, 4), (5, 6)), column="image")
        split = pad_split(Split({"image": column, "label": np.arange(2)}), padding)
        padded = split.columns["image"]
        assert padded.shape == (2, 5, 6, 1)
        assert np.array_equal(padded[:][:, :3, :4], images)
        assert np.count_nonzero(padded[:]) == images.size
        assert split.columns[SIZE][:].tolist() == [[3, 4], [3, 4]]
        assert split.columns[SIZE][:].dtype == np.int32


def test_buckets_of_other_dimensions_are_refused() -> None:
    split = Split({"image": stored(values_of([(2, 5), (3, 1)])), "label": np.arange(2)})
    with pytest.raises(ValueError, match=r"\[\[8\]\]: must have 2 numbers each for these images"):
        pad_split(split, Padding(((8,),), column="image"))


@pytest.mark.parametrize(
    ("flat", "sizes", "message"),
    [
        (np.zeros(6), np.array([2, 4]), r"sizes are int64 \(2,\); must be whole numbers"),
        (np.zeros(6), np.array([[2.0], [4.0]]), r"sizes are float64"),
        (np.zeros(6), np.zeros((0, 1), int), r"sizes are int64 \(0, 1\)"),
        (np.zeros(6), np.array([[6], [0]]), "sizes go down to 0; must be at least 1"),
        (np.zeros(6), np.array([[2], [3]]), r"shape \(6,\); the sizes ask for \(5,\)"),
        (np.zeros((3, 2)), np.array([[2], [4]]), r"shape \(3, 2\); the sizes ask for \(6,\)"),
    ],
)
def test_inconsistent_ragged_storage_is_refused(
    flat: np.ndarray, sizes: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        make_ragged_array(flat, sizes)
