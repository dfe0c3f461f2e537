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
    assert (found.count, found.left_out) == (finite.size, values.size - finite.size)
    assert (found.low, found.high) == (finite.min(), finite.max())
    assert len(found.limits) == len(found.counts)
    assert len(found.counts) in (1, BINS)
    assert list(found.limits) == sorted(found.limits)
    assert np.isclose(found.total, finite.sum(), rtol=1e-9, atol=1e-9 * np.abs(finite).sum())
    assert np.isclose(found.squares, (finite**2).sum())


def test_histogram_counts_match_hand_computed_counts() -> None:
    found = make_histogram(np.array([[0.0, 0.1], [6.35, 6.4]]))
    assert found is not None
    assert found.counts[0] == 1
    assert found.counts[1] == 1
    assert found.counts[-1] == 2
    assert found.limits[-1] == 6.4


def test_half_precision_does_not_overflow() -> None:
    found = make_histogram(np.full(1000, 60000, np.float16))
    assert found is not None
    assert found.total == 60000.0 * 1000
    assert found.squares == 60000.0**2 * 1000
