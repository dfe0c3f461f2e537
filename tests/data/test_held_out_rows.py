from __future__ import annotations

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from pipeline.data.held_out import split_rows


@pytest.mark.medium
@given(
    st.lists(st.integers(1, 60), min_size=1, max_size=8),
    st.floats(0.01, 0.99),
    st.integers(0, 2**63),
)
@example([1, 0, 35, 1, 124, 3], 0.8687154211339255, 0)
@example([1, 1, 3, 2, 2], 0.7602391613346313, 0)
@example([212, 357], 0.5, 0)
def test_strata_differ_by_less_than_a_row_from_their_share(
    sizes: list[int], share: float, seed: int
) -> None:
    labels = np.random.default_rng(seed).permutation(np.repeat(np.arange(len(sizes)), sizes))
    rows = np.array(sizes)
    train, evaluated = split_rows(len(labels), share, seed, labels)
    assert sorted([*train, *evaluated]) == list(range(len(labels)))
    taken = np.bincount(labels[evaluated], minlength=len(sizes))
    assert (np.abs(taken - rows * share) < 1 + 1e-9).all()
    assert (taken < np.maximum(rows, 1)).all()
    # Fewer rows than the share only if every further row is the last one of its stratum.
    most = np.minimum(np.ceil(rows * share), np.maximum(rows - 1, 0)).sum()
    assert len(evaluated) == min(int(len(labels) * share), most)


def test_row_left_for_training_is_replaced_in_the_stratum_that_misses_most() -> None:
    """The row of stratum 1 is trained on. Of strata 0, 2 and 3, which miss 0.6, 0.4 and 0.2 rows,
    stratum 0 has one more."""
    labels = np.repeat([0, 1, 2, 3], [6, 1, 4, 7])
    evaluated = split_rows(len(labels), 0.6, 0, labels)[1]
    assert np.bincount(labels[evaluated], minlength=4).tolist() == [4, 0, 2, 4]


@given(st.integers(1, 300), st.floats(0.01, 0.99), st.integers(0, 2**63))
def test_split_is_a_partition_given_by_the_seed(rows: int, share: float, seed: int) -> None:
    train, evaluated = split_rows(rows, share, seed)
    assert sorted([*train, *evaluated]) == list(range(rows))
    assert len(evaluated) in (int(rows * share), int(rows * share + 1e-6))
    again = split_rows(rows, share, seed)
    assert np.array_equal(again[0], train)


def test_split_is_stable_between_versions() -> None:
    """The stream is fixed: a run of today is split in years as now."""
    assert split_rows(10, 0.3, 0)[1].tolist() == [1, 4, 7]
    assert split_rows(20, 0.2, 0, np.arange(20) % 2)[1].tolist() == [4, 7, 13, 18]
    assert split_rows(100, 0.5, 1)[1].tolist() != split_rows(100, 0.5, 2)[1].tolist()
