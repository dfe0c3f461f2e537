"""docs/architecture.md says what the code does: its picture, annexes, types and moments."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.step_feature import StepFeature
from tests.annexes import ANNEXES
from tests.room_imports import PICTURE, draw_rooms, list_imported_rooms

ROOT = Path(__file__).parents[1]
TEXT = (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.medium
def test_picture_is_drawn_from_the_imports() -> None:
    assert PICTURE.read_text() == draw_rooms(list_imported_rooms())


def test_picture_shows_an_import() -> None:
    drawn = draw_rooms({"core": frozenset(), "data": frozenset({"core"})})
    assert drawn.count("<circle") == 1
    assert "data imports core" in drawn


def test_table_has_the_annexes_and_their_doors() -> None:
    table = TEXT.partition("## Annexes")[2]
    rows = re.findall(r"^\| `([\w./]+)` \| (.+?) \| (.+?) \|$", table, re.MULTILINE)
    doors = {name: tuple(re.findall(r"`([\w.]+)`", text)) for name, text, _ in rows}
    assert doors == {name: annex.doors for name, annex in ANNEXES.items()}


def test_types_are_in_their_files() -> None:
    table = TEXT.partition("## Types")[2].partition("\n## ")[0]
    rows = re.findall(r"^\| (`.+?) \| .+? \| `(.+?)` \|$", table, re.MULTILINE)
    assert len(rows) == 10
    for names, file in rows:
        text = (ROOT / "pipeline" / file).read_text()
        for name in re.findall(r"`(\w+)`", names):
            assert re.search(rf"^class {name}\b", text, re.MULTILINE), name


@pytest.mark.parametrize(("start", "kind"), [("step", StepFeature), ("run", RunFeature)])
def test_moments_are_methods(start: str, kind: type) -> None:
    (line,) = re.findall(
        rf"^\* A \*feature of (?:the|a) {start}\*.*?and others", TEXT, re.MULTILINE | re.DOTALL
    )
    named = re.findall(r"`(\w+)`", line)
    assert len(named) > 3
    methods = list(vars(kind))
    assert [name for name in methods if name in named] == named
