"""Folds of the training split: a partition, drawn by its seed, with equal shares of each class."""

from __future__ import annotations

import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from pydantic import ValidationError

from pipeline.data.columns import RawData, Split, Targets
from pipeline.data.folds import FoldsSpec, find_folds, take_fold
from pipeline.data.held_out import assign_folds
from tests.conftest import ROOT

SETS: dict[str, Any] = json.loads((ROOT / "tests/golden/folds.json").read_text())
CLASSIFIED = ["breast_cancer", "digits", "iris", "wine"]


def make_data(labels: np.ndarray, targets: Targets) -> RawData:
    """Samples whose image is their number, and an evaluation split of zeros."""
    numbers = np.arange(len(labels), dtype=np.int32)
    zeros = np.zeros_like(labels[:7])
    train = Split({"image": numbers, "label": labels}, files=(3, len(labels) - 3))
    return RawData(train, Split({"image": zeros, "label": zeros}), targets)


def classified(labels: np.ndarray) -> RawData:
    return make_data(labels, Targets(tuple(f"class {n}" for n in range(labels.max() + 1))))


@pytest.mark.parametrize("count", [3, 5, 10])
@pytest.mark.parametrize("name", CLASSIFIED)
def test_stratified_folds_match_scikit_learn_golden(name: str, count: int) -> None:
    labels = np.array(list(SETS[name]["labels"]), np.int32)
    expected = np.array(SETS[name]["folds"][str(count)])
    folds = find_folds(classified(labels), FoldsSpec(count=count))
    found = np.stack([np.bincount(labels[folds == n]) for n in range(count)])
    assert found.shape == expected.shape
    assert np.abs(found - expected).max() <= 1
    assert np.ptp(found, axis=0).max() <= 1
    assert sorted(found.sum(axis=1)) == sorted(expected.sum(axis=1))
    assert (np.sort(found, axis=0) == np.sort(expected, axis=0)).all()


@pytest.mark.parametrize("count", [3, 5, 10])
def test_regression_fold_sizes_match_scikit_learn_golden(count: int) -> None:
    rows = SETS["diabetes"]["rows"]
    targets = Targets(("progression",), "regression", (0.0,), (1.0,))
    data = make_data(np.linspace(0, 1, rows, dtype=np.float32)[:, None], targets)
    folds = find_folds(data, FoldsSpec(count=count))
    assert np.bincount(folds).tolist() == SETS["diabetes"]["folds"][str(count)]


@pytest.mark.medium
@given(st.lists(st.integers(0, 4), min_size=2, max_size=80), st.integers(2, 9), st.integers(0, 9))
def test_folds_are_a_partition_and_shares_differ_by_one(
    labels: list[int], count: int, seed: int
) -> None:
    strata = np.array(labels)
    folds = assign_folds(len(labels), count, seed, strata)
    assert ((folds >= 0) & (folds < count)).all()
    assert np.ptp(np.bincount(folds, minlength=count)) <= 1
    for label in set(labels):
        assert np.ptp(np.bincount(folds[strata == label], minlength=count)) <= 1
    assert (folds == assign_folds(len(labels), count, seed, strata)).all()


def test_fold_assignment_is_stable_between_versions() -> None:
    assert assign_folds(12, 3, 0).tolist() == [2, 0, 2, 0, 1, 0, 1, 2, 1, 1, 2, 0]
    assert assign_folds(12, 3, 1, np.arange(12) % 2).tolist() == [
        2,
        2,
        1,
        1,
        2,
        2,
        0,
        0,
        0,
        1,
        1,
        0,
    ]


def test_seed_changes_the_folds() -> None:
    assert (assign_folds(100, 5, 0) != assign_folds(100, 5, 1)).any()


def test_every_training_sample_is_evaluated_once() -> None:
    labels = np.array([0, 1, 2] * 10 + [0, 1], np.int32)
    evaluated, sizes = [], set()
    for index in range(5):
        data = take_fold(classified(labels), FoldsSpec(index=index))
        numbers = [np.asarray(split.columns["image"]) for split in (data.train, data.eval)]
        assert sorted(np.concatenate(numbers)) == list(range(32))
        assert all((np.diff(part) > 0).all() for part in numbers)
        assert (np.asarray(data.eval.columns["label"]) == labels[numbers[1]]).all()
        assert sum(data.train.files) == len(data.train)
        evaluated += numbers[1].tolist()
        sizes.add(tuple(len(split) + split.padding for split in (data.train, data.eval)))
    assert sorted(evaluated) == list(range(32))
    # With the rows that no step reads, all folds have one size, so one program.
    assert sizes == {(26, 7)}


def test_naive_error_is_not_that_of_a_fold() -> None:
    data = make_data(np.zeros((10, 1), np.float32), Targets(("y",), "regression", naive_mae=2.0))
    assert take_fold(data, FoldsSpec()).targets.naive_mae is None


def test_more_folds_than_samples_of_a_class_are_refused() -> None:
    data = classified(np.array([0] * 9 + [1] * 4, np.int32))
    with pytest.raises(ValueError, match=r"count = 5: must be at most 4, .* of class 'class 1'"):
        take_fold(data, FoldsSpec())
    # A label without a class isn't counted.
    assert len(take_fold(data, FoldsSpec(), ignore_index=1).eval) == 3


def test_more_folds_than_samples_are_refused() -> None:
    targets = Targets(("a", "b"), "multi_label")
    data = make_data(np.zeros((4, 2), np.float32), targets)
    with pytest.raises(ValueError, match="count = 5: must be at most 4, the number of samples"):
        take_fold(data, FoldsSpec())


@pytest.mark.parametrize(
    ("settings", "problem"),
    [({"count": 1}, "greater than or equal to 2"), ({"index": 5}, "index = 5: must be 0 to 4")],
)
def test_invalid_folds_settings_are_refused(settings: dict[str, int], problem: str) -> None:
    with pytest.raises(ValidationError, match=problem):
        FoldsSpec(**settings)
