"""Docstrings and names speak the field's language: no private words, a noun or verb first."""

from __future__ import annotations

import ast
import io
import re
import tokenize
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "pipeline").rglob("*.py"))
PRIVATE = re.compile(
    r"\b(anew|behind|so many|whereto|dear|dearest|in the making|taken up|is told|are told|be told|"
    r"tells? (?:the|its|a) user)\b",
    re.IGNORECASE,
)
"""Words that a reader from the field has to guess: after, again, n, where to, expensive, ..."""


@cache
def docstrings(file: Path) -> list[tuple[int, str]]:
    """Return the line and text of every docstring, those below assignments among them."""
    children = (
        child
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(body := getattr(node, "body", None), list)
        for child in body
        if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant)
    )
    return [
        (child.lineno, child.value.value)
        for child in children
        if isinstance(child.value.value, str)
    ]


@pytest.mark.slow
@pytest.mark.parametrize(
    "package", sorted({file.parent for file in FILES}), ids=lambda path: str(path.relative_to(ROOT))
)
def test_docstrings_use_plain_words(package: Path) -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {match[0]}"
        for file in package.glob("*.py")
        for line, text in docstrings(file)
        for match in PRIVATE.finditer(text)
    ]
    assert found == []


@pytest.mark.slow
def test_docstrings_do_not_begin_with_what() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in FILES
        for line, text in docstrings(file)
        if re.match(r"What\b", text)
    ]
    assert found == []


@pytest.mark.slow
def test_public_classes_outside_networks_have_unique_names() -> None:
    names = Counter(
        node.name
        for file in FILES
        if file.parent.name != "networks"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []


# fmt: off
FILLERS = frozenset((
    "own", "found", "given", "asked", "kept", "known", "about", "rest", "around", "one", "each",
    "every", "others", "whole", "said", "told", "drawn", "written", "wanted", "needed",
    "chosen", "shown", "lie",
))
# fmt: on
"""Names that say nothing of a value."""
PREPOSITION = re.compile(
    r"_?(of|by|in|on|at|for|with|without|from|to|as|until|upon|through|around|inside|beyond)_"
)
CONVERSIONS = ("on_", "to_", "from_", "with_", "as_")
"""Prepositions that the field begins names of functions with."""
PARTICIPLE = re.compile(r"[a-z]*(ed|wn|ught|kept|told)$")
PROSE = {
    r"\bwhere\b": 1.8,
    r"\bown\b": 0.8,
    r"\b(?:that|those) of\b": 0.2,
    r"\b(?:is|are) (?:no|none)\b": 0.5,
}
"""Most occurrences of a 1,000 words of docstrings and comments."""


@dataclass(frozen=True)
class Names:
    """The names that the package binds."""

    bindings: list[str]
    functions: list[str]
    packings: int
    lines: int


@pytest.fixture(scope="module")
def names() -> Names:
    bindings, functions, packings, lines = [], [], 0, 0
    for file in FILES:
        source = file.read_text()
        lines += source.count("\n")
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.arg):
                bindings.append(node.arg)
            elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
                bindings.append(node.id)
            elif isinstance(node, ast.FunctionDef) and not node.name.startswith("__"):
                functions.append(node.name.lstrip("_"))
            elif isinstance(node, ast.Assign):
                packings += is_packing(node)
    return Names(bindings, functions, packings, lines)


def is_packing(node: ast.Assign) -> bool:
    """Whether an assignment packs values into a tuple and unpacks them, and swaps none."""
    target, value = node.targets[0], node.value
    if not isinstance(target, ast.Tuple) or not isinstance(value, ast.Tuple):
        return False
    sides = [{ast.unparse(element) for element in side.elts} for side in (target, value)]
    return len(value.elts) > 1 and sides[0] != sides[1]


@pytest.mark.slow
def test_names_have_few_fillers_prepositions_and_participles(names: Names) -> None:
    fillers = sum(name in FILLERS for name in names.bindings)
    assert 1000 * fillers / len(names.bindings) <= 3
    prepositions = [
        name
        for name in names.functions
        if PREPOSITION.match(name) and not name.startswith(CONVERSIONS)
    ]
    assert 1000 * len(prepositions) / len(names.functions) <= 6
    participles = [name for name in names.functions if PARTICIPLE.match(name)]
    assert 1000 * len(participles) / len(names.functions) <= 12


@pytest.mark.slow
def test_tuple_packing_is_rare(names: Names) -> None:
    assert 1000 * names.packings / names.lines <= 1.5


@pytest.mark.slow
@pytest.mark.parametrize("phrase", PROSE)
def test_prose_is_plain(phrase: str) -> None:
    text = read_prose()
    assert 1000 * len(re.findall(phrase, text, re.IGNORECASE)) / len(text.split()) <= PROSE[phrase]


@cache
def read_prose() -> str:
    """Return the docstrings and comments of all files."""
    return " ".join(text for file in FILES for text in prose(file))


def prose(file: Path) -> Iterator[str]:
    """Yield the docstrings of modules, classes and functions, and the comments, of a file."""
    source = file.read_text()
    for node in ast.walk(ast.parse(source)):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef):
            yield ast.get_docstring(node) or ""
    for token in tokenize.generate_tokens(io.StringIO(source).readline):
        if token.type == tokenize.COMMENT:
            yield token.string


VAGUE_NAME = re.compile(
    r"test_(a|an|the|what|where|whatever|who)_|_(told|said|tells|goes_on|nobody)(_|$)"
)
"""Names of tests that begin with an article or "what", or personify code."""


def test_names_of_tests_begin_with_their_subject() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{node.lineno}: {node.name}"
        for file in sorted((ROOT / "tests").rglob("test_*.py"))
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.FunctionDef) and VAGUE_NAME.search(node.name)
    ]
    assert found == []
