from __future__ import annotations

from pathlib import Path

import pytest

from pipeline.data.json_lines import holds_json_lines, parse_objects, require_characters


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
        ('{"a": \n', "line 2 isn't JSON: Expecting value at character 7; must have an object"),
        ("  {a}\n", "line 2 isn't JSON: Expecting property name .* at character 4; must have"),
        ('{"a": "\t"}', "line 2 isn't JSON: Invalid control character at character 8; must have"),
        ("[" * 100_000, "line 2 can't be read: maximum recursion depth"),
        ('{"a": ' + "1" * 5000 + "}", "line 2 can't be read: Exceeds the limit .4300 digits"),
    ],
)
def test_other_line_is_named(line: str, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        list(parse_objects(["{}", line], ("a", "b")))


def test_half_of_a_character_is_named() -> None:
    for text in ("", "a", "é", "\U0001f600", 3, None):
        require_characters(7, "b", text)
    with pytest.raises(ValueError, match=r"^line 1,007: b has \\ud83d, half of a character"):
        require_characters(1007, "b", "ab\ud83d")


def test_list_in_place_of_objects_is_explained() -> None:
    with pytest.raises(ValueError, match="a list of objects must have each on its own line"):
        list(parse_objects(['[{"a": 1}]']))


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        *((name, True) for name in ("a.jsonl", "a.JSONL.gz", "a.ndjson.zip", "a.json")),
        *((name, False) for name in ("a.csv.gz", "jsonl", "a.jsonl.csv", "a.gz")),
    ],
)
def test_suffix_before_the_compression_names_the_content(name: str, expected: bool) -> None:
    assert holds_json_lines(Path("a.jsonl") / name) is expected
