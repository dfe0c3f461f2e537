"""Samples held out of one lot: even by class, a pure function of the seed."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from pipeline.data.held_out import hold_out

NAMES = tuple("abcde")


@pytest.mark.medium
@settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    counts=st.lists(st.integers(2, 40), min_size=1, max_size=5),
    share=st.floats(0.01, 0.99),
    seed=st.integers(0, 2**31 - 1),
)
def test_split_is_stratified_by_class(counts: list[int], share: float, seed: int) -> None:
    groups = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(counts)), counts))
    train, evaluated = hold_out(groups, NAMES, share, seed)
    assert sorted([*train, *evaluated]) == list(range(len(groups)))
    assert (np.diff(train) > 0).all()
    assert (np.diff(evaluated) > 0).all()
    for group, count in enumerate(counts):
        held = int((groups[evaluated] == group).sum())
        assert 1 <= held <= count - 1
        assert held in (1, count - 1) or abs(held - share * count) <= 0.5


def test_held_out_rows_depend_on_the_seed() -> None:
    groups = np.repeat([0, 1], 50)
    first, again, other = (hold_out(groups, NAMES, 0.3, seed)[1] for seed in (1, 1, 2))
    assert first.tolist() == again.tolist()
    assert first.tolist() != other.tolist()


def test_held_out_rows_of_a_class_ignore_other_classes() -> None:
    two = hold_out(np.repeat([0, 1], [20, 30]), NAMES, 0.5, 7)[1]
    one = hold_out(np.repeat([0, 1], [20, 10]), NAMES, 0.5, 7)[1]
    assert one[one < 20].tolist() == two[two < 20].tolist()


def test_class_of_one_sample_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"^b has 1 sample; a split needs at least 2 of each class"
    ):
        hold_out(np.array([0, 0, 1]), NAMES, 0.5, 1)
