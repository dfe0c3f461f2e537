"""Faults of weights: exactly as many as asked for, in different weights, and repeatable."""

from __future__ import annotations

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.inspect.fuzz import (
    FAULT_KINDS,
    count_right,
    inject_faults,
    list_counts,
    measure_faults,
)

PARAMS = {
    "a": np.linspace(1, 2, 60, dtype=np.float32).reshape(6, 10),
    "b": {"c": np.linspace(-3, -1, 40, dtype=np.float32)},
}


@pytest.mark.medium
@pytest.mark.parametrize("fault", FAULT_KINDS)
@given(count=st.integers(1, 100), seed=st.integers(0, 2**31), trial=st.integers(0, 4))
def test_faults_have_the_requested_number(fault: str, count: int, seed: int, trial: int) -> None:
    before = np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(PARAMS)])
    injected = inject_faults(PARAMS, fault, count, seed, trial)
    after = np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(injected)])
    flipped = before.view(np.uint32) ^ after.view(np.uint32)
    is_faulty = flipped != 0
    assert is_faulty.sum() == count
    if fault == "zeros":
        assert (after[is_faulty] == 0).all()
    else:
        assert all(bits.bit_count() == 1 for bits in flipped[is_faulty].tolist())
    if fault == "sign flips":
        assert (after[is_faulty] == -before[is_faulty]).all()
    again = jax.tree.leaves(inject_faults(PARAMS, fault, count, seed, trial))
    assert np.concatenate([leaf.reshape(-1) for leaf in again]).tobytes() == after.tobytes()
    if count < 100:
        more = inject_faults(PARAMS, fault, count + 1, seed, trial)
        larger = np.concatenate([leaf.reshape(-1) for leaf in jax.tree.leaves(more)])
        assert (larger[is_faulty].tobytes()) == after[is_faulty].tobytes()


def test_non_finite_logits_are_wrong() -> None:
    logits = np.array([[0.0, 1.0], [np.nan, 2.0], [np.inf, 1.0], [3.0, -1.0]])
    assert count_right(logits, [1, 1, 0, 1]) == 1


def test_rows_have_each_number_of_faults() -> None:
    assert list_counts(60) == [1, 10]
    assert list_counts(1000) == [1, 10, 100, 1000]

    def share_of_zeros(params: object) -> float:
        return 1 - sum(int((leaf == 0).sum()) for leaf in jax.tree.leaves(params)) / 100

    rows = [row for row in measure_faults(PARAMS, share_of_zeros, 1) if row.fault == "zeros"]
    assert [(row.count, row.accuracy) for row in rows] == [
        (1, pytest.approx(0.99)),
        (10, pytest.approx(0.9)),
        (100, pytest.approx(0)),
    ]
