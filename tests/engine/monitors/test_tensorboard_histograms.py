from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.engine.monitors.tensorboard import BINS, make_histogram


@pytest.mark.slow
@given(
    arrays.arrays(
        np.float32,
        st.integers(1, 200),
        elements=st.floats(-(2.0**100), 2.0**100, width=32)
        | st.sampled_from([np.inf, -np.inf, np.nan]),
    )
)
def test_finite_values_are_counted_once(values: np.ndarray) -> None:
    finite = values[np.isfinite(values)].astype(np.float64)
    found = make_histogram(values)
    if not finite.size:
        assert found is None
        return
    assert found is not None
    limits, counts = found["bucket_limit"], found["bucket"]
    assert found["num"] == sum(counts) == finite.size
    assert (found["min"], found["max"]) == (finite.min(), finite.max())
    assert len(limits) == len(counts)
    assert len(counts) in (1, BINS)
    assert limits == sorted(limits)
    assert np.isclose(found["sum"], finite.sum(), rtol=1e-9, atol=1e-9 * np.abs(finite).sum())
    assert np.isclose(found["sum_squares"], (finite**2).sum())


def test_histogram_counts_match_hand_computed_counts() -> None:
    found = make_histogram(np.array([[0.0, 0.1], [6.35, 6.4]]))
    assert found is not None
    assert found["bucket"][0] == 1
    assert found["bucket"][1] == 1
    assert found["bucket"][-1] == 2
    assert found["bucket_limit"][-1] == 6.4


def test_half_precision_does_not_overflow() -> None:
    found = make_histogram(np.full(1000, 60000, np.float16))
    assert found is not None
    assert found["sum"] == 60000.0 * 1000
    assert found["sum_squares"] == 60000.0**2 * 1000
