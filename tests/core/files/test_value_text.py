"""Values and lists of them in messages."""

from __future__ import annotations

from datetime import datetime

import pytest

from pipeline.core.files.value_text import (
    align_columns,
    count_noun,
    format_bytes,
    format_duration,
    format_moment,
    join_first,
    show,
)


def test_cut_value_shows_no_part_of_a_password() -> None:
    assert show(f"https://user:{'x' * 90}@host") == "https://user:***@host"
    assert show("a" * 61) == f"{'a' * 57}..."


def test_omitted_texts_are_counted() -> None:
    assert join_first(["a", "b"], 2) == "a, b"
    assert join_first(["a", "b", "c"], 2, "; ", "; and ") == "a; b; and 1 more"
    assert join_first([str(n) for n in range(1003)], 2) == "0, 1 and 1,001 more"


def test_columns_are_aligned_without_trailing_spaces() -> None:
    rows = [("name", "n", "note"), ("a", "12", ""), ("bc", "3", "x")]
    assert align_columns(rows, right=(1,)) == ["name   n  note", "a     12", "bc     3  x"]


@pytest.mark.parametrize(
    ("count", "text"), [(0, "0 B"), (999, "999 B"), (1000, "1.0 kB"), (2.5e12, "2,500.0 GB")]
)
def test_byte_counts_have_a_decimal_unit(count: float, text: str) -> None:
    assert format_bytes(count) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (-1.0, "0 s"),
        (0.0042, "0.0042 s"),
        (1.94, "1.9 s"),
        (9.96, "10 s"),
        (89.0, "89 s"),
        (95.0, "2 min"),
        (5399.0, "1 h 30 min"),
        (7500.0, "2 h 5 min"),
        (86400.0, "24 h"),
        (6 * 86400 + 23 * 3600.0, "6 days 23 h"),
        (7 * 86400 + 3600.0, "7 days"),
        (140_580 * 9.6, "15.6 days"),
        (1e30, "11,574 days"),
        (float("inf"), "11,574 days"),
    ],
)
def test_durations_have_the_units_of_a_person(seconds: float, text: str) -> None:
    assert format_duration(seconds) == text


@pytest.mark.parametrize(
    ("seconds", "text"),
    [
        (5, "14:20:05"),
        (1200, "14:40"),
        (36000, "Sun 29 Nov 00:20"),
        (7 * 86400, "Sat 5 Dec 14:20"),
        (40 * 86400, "Thu 7 Jan 2027 14:20"),
        (1e30, "Tue 6 Aug 2058 16:06"),
    ],
)
def test_moments_have_a_date_unless_it_is_today(seconds: float, text: str) -> None:
    assert format_moment(seconds, datetime(2026, 11, 28, 14, 20)) == text


@pytest.mark.parametrize(
    ("count", "words", "text"),
    [
        (1, ("step",), "1 step"),
        (0, ("step",), "0 steps"),
        (1760, ("step",), "1,760 steps"),
        (1, ("batch", "batches"), "1 batch"),
        (2, ("batch", "batches"), "2 batches"),
    ],
)
def test_counted_nouns_agree_with_their_number(
    count: int, words: tuple[str, ...], text: str
) -> None:
    assert count_noun(count, *words) == text
