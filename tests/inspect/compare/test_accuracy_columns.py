"""The columns of a comparison: by hand, and by a second program of the same formulas."""

from __future__ import annotations

from math import isnan, log, nan, sqrt

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from hypothesis.extra import numpy as of_numpy

from pipeline.inspect.compare.accuracy_columns import EPSILON, Columns, compare_arrays
from tests.inspect.compare import cann_formulas

X, Y = np.array([1.0, 2.0, 2.0, 4.0]), np.array([1.0, 2.0, 4.0, 2.0])


def test_columns_match_hand_computed_values() -> None:
    found = compare_arrays(X, Y)
    # x.y = 1 + 4 + 8 + 8 = 21, |x|^2 = |y|^2 = 25
    assert found.cosine == pytest.approx(21 / 25, abs=1e-6)
    assert found.max_absolute == 2
    # 0, 0, |2/4 - 1|, |4/2 - 1|
    assert found.accumulated_relative == pytest.approx(1.5, abs=1e-6)
    assert found.relative_euclidean == pytest.approx(sqrt(8) / 5, abs=1e-6)
    # p = (0, 1, 1, 3) / 5, q = (0, 1, 3, 1) / 5; the zeros are epsilon on both sides
    assert found.divergence == pytest.approx(0.4 * log(3), abs=1e-6)
    assert found.left == pytest.approx((2.25, sqrt(19) / 4), abs=1e-6)
    assert found.right == pytest.approx((2.25, sqrt(19) / 4), abs=1e-6)
    assert found.mean_absolute == pytest.approx(1.0)
    assert found.root_mean_square == pytest.approx(sqrt(2))
    assert (found.max_relative, found.mean_relative) == pytest.approx((1.0, 0.375))
    assert str(compare_arrays(X, X).left) == "(2.25;1.08972)"


def test_accumulated_relative_error_skips_zeros() -> None:
    left, right = np.array([1.1, 5.0, 3.3]), np.array([1.0, 0.0, 3.0])
    assert compare_arrays(left, right).accumulated_relative == pytest.approx(0.2)
    assert compare_arrays(
        np.tile(left, 10), np.tile(right, 10)
    ).accumulated_relative == pytest.approx(2)


@pytest.mark.parametrize(
    ("left", "right", "cosine", "divergence", "distance"),
    [
        (np.zeros(3), np.zeros(3), 1.0, 0.0, 0.0),
        (np.zeros(3), np.arange(3.0), nan, nan, 1.0),
        (np.arange(3.0), np.zeros(3), nan, nan, 0.0),
        (np.full(3, 2.0), np.full(3, 5.0), 1.0, 0.0, 0.6),
        (np.array(2.0), np.array(-3.0), 1.0, 0.0, 5 / 3),
    ],
    ids=["both zero", "left zero", "right zero", "equal elements", "scalars"],
)
def test_columns_of_special_values(
    left: np.ndarray, right: np.ndarray, cosine: float, divergence: float, distance: float
) -> None:
    found = compare_arrays(left, right)
    assert found.cosine == pytest.approx(cosine, nan_ok=True)
    assert found.divergence == pytest.approx(divergence, nan_ok=True)
    assert found.relative_euclidean == pytest.approx(distance)
    assert not isnan(found.max_absolute)


@pytest.mark.parametrize(
    ("left", "right"),
    [(np.ones(3), np.ones(4)), (np.array([1.0, np.nan]), np.ones(2)), (np.ones(0), np.ones(0))],
    ids=["shapes", "not finite", "empty"],
)
def test_incomparable_arrays_have_nan_columns(left: np.ndarray, right: np.ndarray) -> None:
    found = compare_arrays(left, right)
    empty = Columns()
    for name in ("cosine", "max_absolute", "divergence", "relative_euclidean"):
        assert isnan(getattr(found, name))
        assert isnan(getattr(empty, name))


numbers = st.floats(-1e3, 1e3, width=32).filter(lambda x: x == 0 or abs(x) > 1e-3)


@pytest.mark.medium
@given(of_numpy.arrays(np.float32, st.integers(2, 40), elements=numbers))
@settings(max_examples=150, deadline=None)
def test_columns_match_cann_formulas(x: np.ndarray) -> None:
    y = np.float32(x * 1.01 + 0.25 * np.sin(np.arange(len(x))))
    found, left, right = compare_arrays(x, y), x.tolist(), y.tolist()
    expected = {
        "cosine": cann_formulas.cosine(left, right),
        "max_absolute": cann_formulas.max_absolute(left, right),
        "accumulated_relative": cann_formulas.accumulated_relative(left, right),
        "relative_euclidean": cann_formulas.relative_euclidean(left, right),
        "divergence": cann_formulas.divergence(left, right),
    }
    for name, value in expected.items():
        assert getattr(found, name) == pytest.approx(value, rel=1e-6, abs=1e-6, nan_ok=True), name
    assert found.left == pytest.approx(cann_formulas.mean_and_deviation(left), rel=1e-6, abs=1e-6)
    assert found.right == pytest.approx(cann_formulas.mean_and_deviation(right), rel=1e-6, abs=1e-6)


@pytest.mark.medium
def test_sums_are_float64() -> None:
    many = np.full(1 << 20, 0.1, np.float32)
    found = compare_arrays(many, many)
    assert found.left.mean == pytest.approx(float(np.float32(0.1)), rel=1e-12)
    assert found.cosine == pytest.approx(1.0, abs=1e-12)
    assert EPSILON == cann_formulas.EPSILON
