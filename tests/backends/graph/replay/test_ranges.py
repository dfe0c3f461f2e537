from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as arrays

from pipeline.backends.graph.replay.ranges import (
    Range,
    find_largest_magnitude,
    find_non_finite,
    find_range,
    is_float,
)

SPOILT = np.array([[1.0, np.nan, 3.0], [np.inf, -np.inf, -2.0]], np.float32)


def test_range_covers_finite_values_and_counts_non_finite_values() -> None:
    found = find_range(SPOILT)
    assert found == Range("float32", (2, 3), -2.0, 3.0, pytest.approx(2 / 3), 1, 2)
    assert str(found) == "float32 2x3 with 1 NaN and 2 Inf, else -2 to 3, mean 0.6667"


def test_array_without_finite_values_has_no_range() -> None:
    assert str(find_range(np.array([np.nan, np.inf]))) == "float64 2 with 1 NaN and 1 Inf"


def test_scalar_range_is_its_value() -> None:
    assert str(find_range(jnp.bfloat16(2.5))) == "bfloat16 scalar, 2.5"


@pytest.mark.slow
@settings(deadline=None)
@given(
    arrays.arrays(
        st.sampled_from([np.float16, np.float32, np.float64]),
        arrays.array_shapes(max_dims=3, max_side=4),
        elements={"allow_nan": True, "allow_infinity": True},
    )
)
def test_largest_magnitude_is_finite_if_all_values_are(array: np.ndarray) -> None:
    assert np.isfinite(find_largest_magnitude(array)) == np.isfinite(array).all()
    assert np.isnan(find_largest_magnitude(array)) == np.isnan(array).any()
    if np.isfinite(array).all():
        assert find_largest_magnitude(array) == np.abs(array).max()


def test_keys_and_integers_are_not_floats() -> None:
    import jax

    assert not is_float(jax.random.key(0))
    assert not is_float(np.zeros(3, np.int32))
    assert is_float(jnp.zeros(3, jnp.bfloat16))


def test_non_finite_rows_are_detected_along_the_batch_axis() -> None:
    images = np.zeros((4, 2, 2, 3), np.float32)
    images[2, 1, 0, 1] = np.nan
    assert find_non_finite(images, 4) == (2,)
    assert find_non_finite(images.reshape(16, 3), 4) == (2,)
    assert find_non_finite(images.transpose(1, 2, 3, 0), 4, last=True) == (2,)
    assert find_non_finite(images.transpose(3, 1, 2, 0).reshape(3, -1), 4, last=True) == (2,)


def test_array_without_batch_axis_has_no_rows() -> None:
    assert find_non_finite(SPOILT, 5) is None
    assert find_non_finite(np.float32(np.nan), 4) is None
