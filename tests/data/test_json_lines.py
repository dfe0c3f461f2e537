from __future__ import annotations

import pytest

from pipeline.data.json_lines import parse_objects


def test_objects_have_the_numbers_of_their_lines() -> None:
    assert list(parse_objects(['{"a": 1}\n', " \n", '{"b": [2]}'])) == [
        (1, {"a": 1}),
        (3, {"b": [2]}),
    ]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("[1]", "line 2 isn't an object; must have a, b"),
        ("3", "line 2 isn't an object"),
        ('{"a": ', "line 2 isn't JSON: "),
        ("[" * 100_000, "line 2 isn't JSON: "),
    ],
)
def test_other_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(parse_objects(["{}", line], ("a", "b")))
