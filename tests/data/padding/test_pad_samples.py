"""Samples larger than every bucket, and labels of positions, padded and cropped (D-18)."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.batch import Batch
from pipeline.data.columns import Split
from pipeline.data.padding.buckets import (
    SIZE,
    Padding,
    assign_buckets,
    make_ragged_array,
    sort_buckets,
)
from pipeline.data.padding.pad_samples import UNCROPPED_SIZE, crop_to, pad_split
from pipeline.data.random import seed_words

SIZES = np.array([(6, 5), (9, 4), (3, 14), (11, 13), (8, 8), (6, 12)])
BUCKETS = sort_buckets([(8, 8), (6, 12)])
PADDING = Padding(BUCKETS, column="image")
NAMES = PADDING.columns
SEED = seed_words(3)


def places(size: tuple[int, int]) -> np.ndarray:
    """1000 times the row and the column of every place, from 1: (height, width)."""
    rows, columns = (np.arange(1, length + 1) for length in size)
    return (1000 * rows[:, None] + columns).astype(np.int32)


def split() -> Split:
    """Images that say where each pixel was, and labels that say it too."""
    values = np.concatenate([places(tuple(size)).ravel() for size in SIZES])
    return Split(
        {"image": make_ragged_array(values, SIZES, (1,)), "label": make_ragged_array(values, SIZES)}
    )


def padded() -> dict[str, Any]:
    columns = pad_split(split(), PADDING, ignore_index=-1, crop=True).columns
    return {name: column[:] for name, column in columns.items()}


def batch_of(columns: dict[str, Any], rows: np.ndarray, epoch: Any) -> Batch:
    return Batch(columns, SEED, np.int32(epoch), rows, np.int32(len(rows)))  # type: ignore[arg-type]


def test_padding_of_images_keeps_facts_of_the_split() -> None:
    """Without the rows of zeros after them, folds of several sizes can't share a program."""
    facts = {"files": (2, 4), "padding": 1, "original_rows": np.arange(6)[::-1]}
    padded_split = pad_split(replace(split(), **facts), PADDING, ignore_index=-1, crop=True)
    assert {name: getattr(padded_split, name) for name in facts} == facts


def test_cropped_sample_is_assigned_to_bucket_keeping_most() -> None:
    """In the order of `sort_buckets`: 64 and 72 places."""
    assert BUCKETS == ((8, 8), (6, 12))
    assert assign_buckets(SIZES, BUCKETS, crop=True).tolist() == [0, 0, 1, 1, 0, 1]


def test_images_are_padded_to_the_largest_sizes() -> None:
    columns = padded()
    assert columns["image"].shape == (6, 11, 14, 1)
    assert columns[UNCROPPED_SIZE].tolist() == SIZES.tolist()
    assert columns[SIZE].tolist() == [[6, 5], [8, 4], [3, 12], [6, 12], [8, 8], [6, 12]]
    for image, label, size in zip(columns["image"], columns["label"], SIZES, strict=True):
        height, width = size
        assert np.array_equal(image[:height, :width, 0], places(tuple(size)))
        assert np.array_equal(label[:height, :width], places(tuple(size)))
        assert np.count_nonzero(image) == np.count_nonzero(label != -1) == height * width


@pytest.mark.parametrize("drawn", [True, False])
def test_crop_is_a_contiguous_part_of_the_sample(drawn: bool) -> None:
    """Rows and columns in order, labels of the same places, padding after them."""
    columns = padded()
    numbers = assign_buckets(columns[SIZE], BUCKETS)
    corners = []
    for epoch in range(40):
        for number, bucket in enumerate(BUCKETS):
            rows = np.flatnonzero(numbers == number).astype(np.int32)
            batch = batch_of({name: column[rows] for name, column in columns.items()}, rows, epoch)
            crop = crop_to(np, bucket, batch, NAMES, is_random=drawn).columns
            for position, row in enumerate(rows):
                height, width = columns[SIZE][row]
                image, label = crop["image"][position, ..., 0], crop["label"][position]
                assert image.shape == label.shape == bucket
                inside = image[:height, :width]
                top, left = divmod(int(inside[0, 0]), 1000)
                whole = places(tuple(SIZES[row]))
                part = whole[top - 1 : top - 1 + height, left - 1 : left - 1 + width]
                assert np.array_equal(inside, part)
                assert np.array_equal(label[:height, :width], part)
                assert np.count_nonzero(image) == np.count_nonzero(label != -1) == part.size
                corners.append((int(row), top, left))
    result = {row: {(top, left) for r, top, left in corners if r == row} for row in range(6)}
    assert [result[row] for row in (0, 4, 5)] == [{(1, 1)}] * 3
    if drawn:
        assert result[1] == {(1, 1), (2, 1)}
        assert result[2] == {(1, 1), (1, 2), (1, 3)}
        assert {top for top, _ in result[3]} == set(range(1, 7))
    else:
        assert (result[1], result[2], result[3]) == ({(1, 1)}, {(1, 2)}, {(3, 1)})


@pytest.mark.medium
def test_crop_place_depends_only_on_seed_epoch_and_sample() -> None:
    """Host and compiled step agree, and neither the batch nor the position in it matters."""
    columns = padded()
    rows = np.array([3, 2, 5, 3], np.int32)
    batch = batch_of({name: column[rows] for name, column in columns.items()}, rows, 7)
    host = crop_to(np, (6, 12), batch, NAMES, is_random=True).columns
    compiled = jax.jit(lambda b: crop_to(jnp, (6, 12), b, NAMES, is_random=True))(batch).columns
    for name in ("image", "label"):
        assert np.array_equal(host[name], compiled[name])
        assert np.array_equal(host[name][0], host[name][3])
    alone = batch_of({name: column[3:4] for name, column in columns.items()}, rows[:1], 7)
    single = crop_to(np, (6, 12), alone, NAMES, is_random=True).columns
    assert np.array_equal(single["image"][0], host["image"][0])
    batches = [replace(alone, seed=seed_words(seed)) for seed in range(9)]
    crops = [crop_to(np, (6, 12), batch, NAMES, is_random=True).columns for batch in batches]
    assert len({float(crop["image"][0, 0, 0, 0]) for crop in crops}) > 3


def test_crop_places_are_uniform() -> None:
    """Pearson's test over the 6 x 2 corners of a sample of 11x13 in a bucket of 6x12."""
    rows = np.full(6000, 3, np.int32)
    columns = {name: np.repeat(column[3:4], 6000, axis=0) for name, column in padded().items()}
    batch = batch_of(columns, rows, np.arange(6000))
    crop = crop_to(np, (6, 12), batch, NAMES, is_random=True)
    corners = np.asarray(crop.columns["image"])[:, 0, 0, 0]
    _, counts = np.unique(corners, return_counts=True)
    assert len(counts) == 12
    assert ((counts - 500) ** 2 / 500).sum() < 31.26  # p = 0.001 of 11 degrees of freedom


def test_position_labels_are_padded_with_ignore_index() -> None:
    tokens = np.arange(1, 9, dtype=np.int32)
    sizes = np.array([[3], [5]])
    ragged = Split(
        {
            "tokens": make_ragged_array(tokens, sizes),
            "label": make_ragged_array(tokens, sizes),
        }
    )
    padded_split = pad_split(ragged, Padding(((6,),), column="tokens"), ignore_index=-100)
    assert padded_split.columns["tokens"][:].tolist() == [[1, 2, 3, 0, 0, 0], [4, 5, 6, 7, 8, 0]]
    labels = padded_split.columns["label"][:]
    assert labels.tolist() == [[1, 2, 3, -100, -100, -100], [4, 5, 6, 7, 8, -100]]


def test_numbers_of_a_sample_are_neither_padded_nor_cropped() -> None:
    sizes = np.array([[3], [5]])
    tokens = make_ragged_array(np.arange(1, 9, dtype=np.int32), sizes)
    numbers = np.arange(6, dtype=np.float32).reshape(2, 3)
    padding = Padding(((2,), (6,)), column="tokens")
    columns = pad_split(Split({"tokens": tokens, "label": numbers}), padding, crop=True).columns
    batch = batch_of({name: column[:] for name, column in columns.items()}, np.arange(2), 0)
    cropped = crop_to(np, (2,), batch, padding.columns, is_random=False).columns
    assert cropped["tokens"].tolist() == [[1, 2], [4, 5]]
    assert cropped["label"].tolist() == numbers.tolist()


@pytest.mark.parametrize(
    ("label", "ignore_index", "message"),
    [
        (np.zeros((2, 3, 4), int), None, r"labels of shape \(3, 4\) need padding too; set dataset"),
        (np.zeros((2, 4), int), -1, r"labels of shape \(4,\) don't have the sizes of the images"),
        (np.zeros((2, 4, 3), int), -1, r"labels of shape \(4, 3\) don't have the sizes"),
        (np.zeros((2, 3, 4), np.uint8), -1, r"labels are uint8, which can't hold .* be 0 to 255$"),
    ],
)
def test_unpaddable_labels_are_refused(
    label: np.ndarray, ignore_index: int | None, message: str
) -> None:
    images = Split({"image": np.zeros((2, 3, 4, 1)), "label": label})
    with pytest.raises(ValueError, match=message):
        pad_split(images, Padding(((4, 4),), column="image"), ignore_index=ignore_index)
