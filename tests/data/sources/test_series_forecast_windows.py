"""Windows inside of one part of a series, and the seasonal naive forecast."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.data.sources.series import (
    WindowSizes,
    cut_windows,
    forecast_seasonal_naive,
    split_time,
)

SIZES = WindowSizes(inputs=4, horizon=3, stride=2)
ROWS = np.arange(10.0)[:, None]


def test_windows_follow_each_other() -> None:
    inputs, labels = cut_windows(ROWS, np.concatenate([ROWS, -ROWS], axis=1), SIZES, 2)
    assert inputs[..., 0].tolist() == [[0, 1, 2, 3], [2, 3, 4, 5]]
    assert labels.tolist() == [[4, -4, 5, -5, 6, -6], [6, -6, 7, -7, 8, -8]]


@pytest.mark.parametrize(
    ("period", "expected"),
    [(1, [3, 3, 3]), (2, [2, 3, 2]), (3, [1, 2, 3]), (4, [0, 1, 2])],
)
def test_naive_forecast_is_the_last_season_of_the_inputs(period: int, expected: list[int]) -> None:
    naive = forecast_seasonal_naive(ROWS, SIZES, period)
    assert naive.shape == (4, 3)
    assert naive[0].tolist() == expected
    assert naive[3].tolist() == [value + 3 for value in expected]


def test_naive_forecast_of_a_season_is_exact() -> None:
    rows = np.tile([1.0, 5.0, 2.0], 5)[:, None]
    sizes = WindowSizes(inputs=3, horizon=5, stride=1)
    _, labels = cut_windows(rows, rows, sizes, 1)
    np.testing.assert_array_equal(forecast_seasonal_naive(rows, sizes, 3), labels)


def test_parts_shorter_than_a_window_are_refused() -> None:
    assert split_time(20, 0.4, SIZES) == 12
    with pytest.raises(ValueError, match=r"leaves 4 for evaluation; a window has .* = 7"):
        split_time(20, 0.2, SIZES)
    with pytest.raises(ValueError, match="leaves 6 for training"):
        split_time(14, 0.6, SIZES)
