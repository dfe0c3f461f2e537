"""Deadlines: the next 18:00, times with an offset, days on which clocks change."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from datetime import UTC, datetime
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config import deadline
from pipeline.config.deadline import find_clock_time, find_deadline
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError

Compose = Callable[..., Recipe]


@pytest.fixture
def berlin(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setenv("TZ", "CET-1CEST,M3.5.0,M10.5.0/3")
    time.tzset()
    yield
    monkeypatch.undo()
    time.tzset()


def utc(text: str) -> float:
    return datetime.fromisoformat(text).replace(tzinfo=UTC).timestamp()


@pytest.mark.parametrize(
    ("now", "text", "at"),
    [
        ("2026-11-26T12:00", "18:00", "2026-11-26T17:00"),
        ("2026-11-26T17:00", "18:00", "2026-11-27T17:00"),  # shown just now
        ("2026-11-26T20:00", "07:30:15", "2026-11-27T06:30:15"),
        ("2026-11-26T20:00", "7:30", "2026-11-27T06:30"),
        ("2026-11-26T20:00", "7:30:15", "2026-11-27T06:30:15"),
        ("2026-03-28T20:00", "18:00", "2026-03-29T16:00"),  # the night loses an hour
        ("2026-03-29T00:00", "02:30", "2026-03-29T01:30"),  # 02:30 is left out, 03:30 is shown
        ("2026-10-25T00:00", "02:30", "2026-10-25T00:30"),  # the first 02:30 of two
        ("2026-10-25T00:45", "02:30", "2026-10-25T01:30"),  # the second
        ("2026-10-25T01:45", "02:30", "2026-10-26T01:30"),
        ("2026-11-26T12:00", "2026-11-26 18:00", "2026-11-26T17:00"),
        ("2026-11-26T12:00", "2026-11-26T18:00-08:00", "2026-11-27T02:00"),
        ("2026-11-26T12:00", "2026-11-26T18:00Z", "2026-11-26T18:00"),
    ],
)
def test_clock_time_is_the_next_on_the_local_clock(
    berlin: None, now: str, text: str, at: str
) -> None:
    assert find_clock_time(text, utc(now)) == utc(at)


@given(st.integers(0, 4_000_000_000), st.integers(0, 23), st.integers(0, 59))
def test_clock_time_is_within_a_day(now_s: int, hour: int, minute: int) -> None:
    at_s = find_clock_time(f"{hour:02}:{minute:02}", now_s)
    assert now_s < at_s <= now_s + 25 * 3600


@pytest.mark.parametrize(
    "text",
    [
        *("1800", "18", "25:00", "18:00+01:00", "2026-11-26", "20261126T1800", "18:00Z", ""),
        *("0001-01-01T00:00", "2027-01-31T18+01:00", "2027-01-31T18-01:00"),
    ],
)
def test_invalid_until_is_refused(tiny: Compose, text: str) -> None:
    with pytest.raises(RecipeError, match=r"train\.until = .*: must be a time such as 18:00"):
        tiny(f"train.until='{text}'")


@pytest.mark.slow
def test_deadline_counts_from_the_start(tiny: Compose, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = SimpleNamespace(time=lambda: utc("2026-11-26T12:00"), perf_counter=lambda: 100.0)
    monkeypatch.setattr(deadline, "time", clock)
    assert find_deadline(tiny("train.minutes=2").train, 90.0) == 210
    assert find_deadline(tiny("train.steps=2").train, 90.0) is None
    until = tiny("train.until=2026-11-26T12:01Z").train
    assert find_deadline(until, 90.0) == 160
    past = tiny("train.until=2026-11-26T11:59:50Z").train
    with pytest.raises(RecipeError, match=r"train\.until = 2026-11-26T11:59:50Z: is past; must be"):
        find_deadline(past, 90.0)
    far = tiny("train.until='9999-01-01T00:00Z'").train
    with pytest.raises(RecipeError, match=r"train\.until = 9999-.*: must be within a year"):
        find_deadline(far, 90.0)
