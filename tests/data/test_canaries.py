from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.canaries import choose_canaries, plant_canaries
from pipeline.data.columns import RawData, Split, Targets
from pipeline.data.held_out import assign_folds, hold_out


def make_data(labels: np.ndarray) -> RawData:
    split = Split({"image": np.zeros((len(labels), 2, 2, 1), np.uint8), "label": labels})
    return RawData(split, split, Targets(("a", "b", "c")))


def test_canaries_alone_have_wrong_labels() -> None:
    labels = np.arange(60, dtype=np.int32) % 3
    canaries = choose_canaries(60, 30, seed=4)
    assert len(set(canaries.tolist())) == 30
    planted = plant_canaries(make_data(labels), canaries, seed=4)
    changed = np.asarray(planted.train.columns["label"])
    assert set(np.flatnonzero(changed != labels).tolist()) == set(canaries.tolist())
    assert changed.dtype == labels.dtype
    assert set(changed.tolist()) == {0, 1, 2}
    np.testing.assert_array_equal(planted.eval.columns["label"], labels)


def test_no_two_draws_have_one_key(monkeypatch: pytest.MonkeyPatch) -> None:
    """Draws by one key have the same words: canaries would depend on their labels, and both on the
    samples held out for evaluation."""
    keys = []

    def record_key(key: np.ndarray) -> np.random.Philox:
        keys.append(tuple(key.tolist()))
        return plain_philox(key=key)

    plain_philox = np.random.Philox
    monkeypatch.setattr(np.random, "Philox", record_key)
    labels = np.arange(60, dtype=np.int32) % 3
    hold_out(labels, ("a", "b", "c"), 0.2, seed=4)
    assign_folds(60, 5, seed=4)
    plant_canaries(make_data(labels), choose_canaries(60, 30, seed=4), seed=4)
    assert len(set(keys)) == len(keys) == 6


def test_canaries_are_at_most_half_of_the_samples() -> None:
    with pytest.raises(ValueError, match="31 canaries: must be at most half of 60 samples"):
        choose_canaries(60, 31, seed=4)


def test_samples_need_one_class_each() -> None:
    data = make_data(np.zeros((4, 2), np.int32))
    with pytest.raises(ValueError, match="each sample has one of several classes"):
        plant_canaries(data, np.array([0]), seed=4)
