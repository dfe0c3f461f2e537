"""Tests of the comparison of outlooks with what happened."""

from __future__ import annotations

import pytest

from benchmarks.outlooks import OUTLOOK, parse_duration
from pipeline.core.files.value_text import format_duration


@pytest.mark.parametrize("seconds", [0.012, 4.6, 75.0, 720.0, 7_500.0, 200_000.0, 1_350_000.0])
def test_duration_is_read_as_it_is_printed(seconds: float) -> None:
    # Texts have at least two digits.
    assert parse_duration(format_duration(seconds)) == pytest.approx(seconds, rel=0.05)


@pytest.mark.parametrize(
    ("line", "text"),
    [
        ("outlook    about 2.22 ms a step, 4.6 s in all; ends at about 15:13:23", "4.6 s"),
        ("outlook    steps are slower than expected: about 4.3 s a step, 2 h 5 min in all; ends",
         "2 h 5 min"),
    ],
)  # fmt: skip
def test_time_in_all_is_read_from_an_outlook(line: str, text: str) -> None:
    match = OUTLOOK.match(line)
    assert match is not None
    assert match[3] == text
