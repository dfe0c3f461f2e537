"""Values and statements of a script that is parsed, and never run."""

from __future__ import annotations

import ast
from typing import Any

import pytest

from pipeline.config.foreign.script import Expression, Script


def parse(text: str) -> Script:
    return Script(ast.parse(text))


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("3", 3),
        ("'text'", "text"),
        ("b'text'", "text"),
        ("tf.compat.as_bytes('text')", "text"),
        ("N", 7),
        ("Config(a=N, b=Inner(c=[1]))", {"a": 7, "b": {"c": [1]}}),
        ("f(3)", Expression("f(3)")),
        ("as_bytes(name)", Expression("as_bytes(name)")),
        ("{1, 2}", Expression("{1, 2}")),
        ("M", Expression("M")),
    ],
)
def test_value_is_a_literal_a_call_or_an_expression(text: str, value: Any) -> None:
    script = parse(f"N = 7\nM = 1\nM = 2\nvalue = {text}")
    assert script.read_value(script.constants["value"]) == value


def test_statements_are_listed_unless_they_are_read() -> None:
    script = parse(
        "'A docstring.'\nimport os\nUSED = 1\nUNUSED = 2\n"
        "def f():\n    return 3\n"
        "for x in y:\n    read(USED)\n    other = 4\n"
        "match x:\n    case 1:\n        read(2)\n        third = 5\n"
        "g(read(3), k=6)\n"
    )
    calls = script.find_calls(["read"])
    for call in calls:
        script.read_value(call.args[0])
    assert list(script.list_other_code(calls)) == [
        (4, "UNUSED = 2"),
        (5, "def f():"),
        (7, "for x in y:"),
        (9, "other = 4"),
        (10, "match x:"),
        (13, "third = 5"),
        (14, "g(read(3), k=6)"),
    ]
