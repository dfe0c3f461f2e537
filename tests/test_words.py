"""Docstrings and names speak the field's language: no private words, a noun or verb first."""

from __future__ import annotations

import ast
import re
from collections import Counter
from collections.abc import Iterator
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


def docstrings(file: Path) -> Iterator[tuple[int, str]]:
    """Yield the line and text of every docstring, those below assignments among them."""
    for node in ast.walk(ast.parse(file.read_text())):
        body = getattr(node, "body", None)
        for child in body if isinstance(body, list) else ():
            value = child.value if isinstance(child, ast.Expr) else None
            if isinstance(value, ast.Constant) and isinstance(value.value, str):
                yield child.lineno, value.value


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
def test_docstrings_begin_with_a_noun_or_a_verb() -> None:
    found = [
        f"{file.relative_to(ROOT)}:{line}: {text.splitlines()[0]}"
        for file in FILES
        for line, text in docstrings(file)
        if re.match(r"What\b", text)
    ]
    assert found == []


@pytest.mark.slow
def test_no_public_class_outside_networks_shares_its_name() -> None:
    names = Counter(
        node.name
        for file in FILES
        if file.parent.name != "networks"
        for node in ast.parse(file.read_text()).body
        if isinstance(node, ast.ClassDef) and not node.name.startswith("_")
    )
    assert [name for name, count in names.items() if count > 1] == []
