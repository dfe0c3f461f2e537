"""The table of requirements is complete: each code has a command that parses, and a test."""

from __future__ import annotations

import ast
import inspect
import re
import shlex
from importlib import import_module
from typing import Any, get_type_hints

import click
import pytest

from pipeline.cli.commands.command import PROGRAM
from pipeline.cli.commands.root import ROOT as COMMANDS
from pipeline.config.compose import compose_and_check
from tests.requirement_rows import ROOT, ROWS, Row

COUNTS = {
    "A": 7, "B": 2, "C": 8, "D": 20, "E": 4, "F": 5, "G": 6, "H": 4, "I": 4, "K": 6, "L": 9,
    "M": 17, "N": 33, "P": 4, "Q": 12, "R": 9, "S": 19, "T": 6, "V": 8, "X": 6, "Z": 1,
}  # fmt: skip
"""Codes of each letter, numbered from 1."""
CODES = [f"{letter}-{n:02}" for letter, count in COUNTS.items() for n in range(1, count + 1)]
NOT_IMPLEMENTED: list[str] = []
DOCUMENTED = [
    "A-07",
    "H-04",
    "Q-08",
    "Q-09",
    "Q-10",
    "Q-11",
    "Q-12",
    "S-17",
    "S-18",
    "S-19",
    "T-03",
    "T-04",
    "T-06",
]
"""Codes without a command."""
SEARCHES = ("recommend",)
"""Commands whose keys have several values each, which is no recipe."""


COMMAND_ROWS = [row for row in ROWS if row.command != "none"]


def test_table_has_every_code_once() -> None:
    assert len(CODES) == 190
    assert [row.code for row in ROWS] == CODES


def test_cited_codes_are_in_the_table() -> None:
    files = [*(ROOT / "tests").rglob("*.py"), *(ROOT / "docs").glob("*.md")]
    cited = {code for file in files for code in re.findall(r"\b[A-Z]-\d\d\b", file.read_text())}
    assert sorted(cited - set(CODES)) == []


@pytest.mark.medium
def test_tests_of_the_table_exist() -> None:
    missing = [row.code for row in ROWS if not _is_test(row.test)]
    assert missing == NOT_IMPLEMENTED


def _is_test(cell: str) -> bool:
    match = re.fullmatch(r"`(tests/[\w/]+\.py)::(test_\w+)`", cell)
    if match is None or not (ROOT / match[1]).is_file():
        return False
    body = ast.parse((ROOT / match[1]).read_text()).body
    return match[2] in [node.name for node in body if isinstance(node, ast.FunctionDef)]


def test_rows_are_short() -> None:
    assert [row.code for row in ROWS if len(" ".join(row).split()) > 25] == []


def test_codes_have_commands() -> None:
    missing = [row.code for row in ROWS if not re.fullmatch("`[^`]+`", row.command)]
    assert missing == sorted([*DOCUMENTED, *NOT_IMPLEMENTED])


@pytest.mark.slow
@pytest.mark.parametrize("row", COMMAND_ROWS, ids=[row.code for row in COMMAND_ROWS])
def test_command_is_valid(row: Row, monkeypatch: pytest.MonkeyPatch) -> None:
    """Beside a plug-in with the code that it names."""
    monkeypatch.setattr("pipeline.core.plugins.loading.find_object", lambda _: object())
    command = row.command.strip("`")
    if command.startswith(("pipeline.", "jax.")):
        evaluate_type(ast.parse(command, mode="eval").body)
    else:
        parse_command(shlex.split(command))


def parse_command(words: list[str]) -> None:
    """Parse the words after `python -m pipeline`, and compose the recipe that they describe."""
    command: click.Command = COMMANDS
    name = words[0]
    while isinstance(command, click.Group) and words[0] in command.commands:
        command, words = command.commands[words[0]], words[1:]
    if command is not COMMANDS:
        parsed = command.make_context(PROGRAM, words).params
        words = [word for word in parsed.get("overrides", ()) if "=" in word]
    if name not in SEARCHES:
        compose_and_check(words)


def evaluate_type(node: ast.expr) -> Any:
    """Return the object that an expression names, or the class of what a call returns.

    Nothing is called. Raises AttributeError for an unknown name, TypeError for wrong arguments.
    """
    match node:
        case ast.Name():
            return import_module(node.id)
        case ast.Attribute():
            return getattr(evaluate_type(node.value), node.attr)
        case ast.Call():
            function = evaluate_type(node.func)
            keywords = {str(keyword.arg): None for keyword in node.keywords}
            is_method = inspect.isfunction(function) and "." in function.__qualname__
            inspect.signature(function).bind(*[None] * (len(node.args) + is_method), **keywords)
            return function if isinstance(function, type) else get_type_hints(function)["return"]
    raise ValueError(ast.unparse(node))
