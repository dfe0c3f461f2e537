from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.data.held_out import split_rows


@pytest.mark.medium
@given(
    st.lists(st.integers(0, 4), min_size=1, max_size=80),
    st.floats(0.05, 0.95),
    st.integers(0, 2**63),
)
def test_split_rows_is_stratified(strata: list[int], share: float, seed: int) -> None:
    labels = np.array(strata)
    train, evaluated = split_rows(len(labels), share, seed, labels)
    assert sorted([*train, *evaluated]) == list(range(len(labels)))
    for stratum in set(strata):
        rows = int((labels == stratum).sum())
        taken = int((labels[evaluated] == stratum).sum())
        assert rows * share - 2 < taken < rows * share + 1
        assert taken < rows


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
    assert split_rows(100, 0.5, 1)[1].tolist() != split_rows(100, 0.5, 2)[1].tolist()
