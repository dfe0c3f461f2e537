"""Series of several lengths, and labels as classes or numbers."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest

from pipeline.core.errors import DataError
from pipeline.data.series.series_files import RawSeries, stack_series


def make(*lengths: int, channels: int = 1) -> RawSeries:
    values = tuple(np.arange(n * channels, dtype=float).reshape(n, channels) for n in lengths)
    places = tuple(f"line {row}" for row in range(len(lengths)))
    return RawSeries(values, ("a",) * len(lengths), places)


def test_series_are_cut_and_padded_at_the_end() -> None:
    (stacked,) = stack_series({Path("a"): make(2, 4)}, 3)
    np.testing.assert_array_equal(stacked[..., 0], [[0, 1, np.nan], [0, 1, 2]])


def test_several_lengths_are_refused_without_a_choice() -> None:
    expected = r"^b: line 1 has 4 steps, and line 0 of a has 3; .* or set dataset.length"
    with pytest.raises(DataError, match=expected):
        stack_series({Path("a"): make(3), Path("b"): make(3, 4)}, None)


def test_several_numbers_of_channels_are_refused() -> None:
    with pytest.raises(DataError, match=r"^b: has 2 channels, and a has 1; must be equal"):
        stack_series({Path("a"): make(3), Path("b"): make(3, channels=2)}, 3)


def test_class_of_no_training_series_is_named() -> None:
    raw = RawSeries((), ("10", "9", "z"), ("line 1", "line 2", "line 3"))
    assert raw.list_classes() == ("10", "9", "z")
    with pytest.raises(ValueError, match="line 3: has class z, which no training series has"):
        raw.number_labels(("9", "10"))


def test_label_that_is_no_number_is_named() -> None:
    raw = RawSeries((), ("1.5", "nan"), ("line 1", "line 2"))
    with pytest.raises(ValueError, match="line 2: has label nan; must be a finite number"):
        raw.parse_numbers()


def test_classes_of_equal_numbers_have_one_order() -> None:
    """A set has another order in each process."""
    labels = ("1", "01", "1.0", "1e0", "+1", "1.00", "10", "2")
    raw = RawSeries((), labels, labels)
    assert raw.list_classes() == ("+1", "01", "1", "1.0", "1.00", "1e0", "2", "10")


def test_number_with_underscores_is_refused() -> None:
    with pytest.raises(ValueError, match="line 1: has label 1_0; must be a finite number"):
        RawSeries((), ("1_0",), ("line 1",)).parse_numbers()
