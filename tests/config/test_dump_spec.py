"""Steps of a dump as a recipe names them."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.config.dump_spec import MAX_DUMPED, parse_steps


@pytest.mark.parametrize(
    ("text", "steps"),
    [
        ("0", (0,)),
        ("10|0|5", (0, 5, 10)),
        ("5-8", (5, 6, 7, 8)),
        (" 7 | 5-8 |5", (5, 6, 7, 8)),
        ("3-3", (3,)),
    ],
)
def test_steps_are_sorted_and_unique(text: str, steps: tuple[int, ...]) -> None:
    assert parse_steps(text) == steps


@pytest.mark.medium
@given(steps=st.sets(st.integers(0, 10**9 - 1), min_size=1, max_size=20))
def test_list_of_steps_is_parsed(steps: set[int]) -> None:
    assert parse_steps("|".join(map(str, steps))) == tuple(sorted(steps))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("", "must be steps such as"),
        ("5,6", "not '5,6'"),
        ("-1", "not '-1'"),
        ("1" * 10, "not '1111111111'"),
        ("8-5", "8-5: must not end before its first step"),
        (f"0-{MAX_DUMPED}", "must be at most 10,000 steps"),
        ("0-9999|10000-19998", "19,999 steps or more; must be at most 10,000"),
    ],
)
def test_invalid_steps_are_refused(text: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        parse_steps(text)
