"""The gallery: twelve results, each with a small picture, its text and commands that are valid."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from xml.etree.ElementTree import parse

import pytest
from PIL import Image

from benchmarks.gallery import (
    MAX_BYTES,
    PAGE,
    PICTURES,
    RESULTS,
    Result,
    extract_drawing,
    format_result,
    read_figures,
    run_commands,
    write_picture,
)
from pipeline.cli.commands.root import ROOT
from pipeline.config.compose import compose_and_check
from pipeline.core.pages.page import Charts, Drawing, Page, Section, write_page

TEXT = PAGE.read_text("utf-8")
SHOWN = re.findall(r"!\[([^\]]+)\]\(([^)]+)\)", TEXT)


def test_page_has_twelve_results_with_picture_text_and_command() -> None:
    sections = TEXT.split("\n## ")[1:]
    assert len(sections) == 12
    for section in sections:
        assert section.count("![") == 1
        assert "\n    python -m " in section
    for result in RESULTS:
        (section,) = [part for part in sections if part.startswith(f"{result.title}\n")]
        assert re.findall(r"^    python -m pipeline (.+)$", section, re.MULTILINE) == [
            *result.commands
        ]


def test_pictures_are_small_and_have_a_text() -> None:
    assert all(len(text) > 30 for text, _ in SHOWN)
    files = [PAGE.parent / path for _, path in SHOWN]
    assert {file for file in files if file.parent == PICTURES} == set(PICTURES.iterdir())
    for file in files:
        assert 1_000 < file.stat().st_size <= MAX_BYTES
        if file.suffix == ".svg":
            assert parse(file).getroot().attrib["aria-label"]
        else:
            with Image.open(file) as image:
                assert min(image.size) > 100


@pytest.mark.medium
def test_recipes_of_the_commands_are_valid() -> None:
    for command in (command for result in RESULTS for command in result.commands):
        words = shlex.split(command)
        keys = [word for word in words if "=" in word and not word.startswith("hydra.")]
        if keys:
            compose_and_check([key if "[" in key else key.partition(",")[0] for key in keys])


def test_arguments_of_the_commands_are_valid() -> None:
    lines = [shlex.split(command) for result in RESULTS for command in result.commands]
    named = [words for words in lines if words[0] in ROOT.commands]
    assert len(named) > 5
    for name, *arguments in named:
        ROOT.commands[name].make_context(name, arguments)


def test_drawing_of_a_page_becomes_a_file(tmp_path: Path) -> None:
    chart = Drawing(300, 200, "a chart")
    chart.add("rect", "blue", x=1, y=2, width=30, height=40)
    write_page(tmp_path / "page.html", Page("p", "t", "a", [Section("s", "", [Charts([chart])])]))
    file = tmp_path / "chart.svg"
    file.write_text(extract_drawing((tmp_path / "page.html").read_text(), "another text"))
    root = parse(file).getroot()
    assert root.attrib["aria-label"] == "another text"
    assert root.attrib["viewBox"].split()[2] == f"{300 + 2 * 24}"
    assert any(mark.get("width") == "30" for mark in root.iter())
    with pytest.raises(ValueError, match="the page has no drawing"):
        extract_drawing("<p>", "text")


@pytest.mark.slow
def test_result_is_made_by_its_commands(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("benchmarks.gallery.PICTURES", tmp_path / "gallery")
    monkeypatch.setattr("benchmarks.gallery.PAGE", tmp_path / "gallery.md")
    commands = (
        "+recipe=breast_cancer_mlp train.epochs=2 hydra.run.dir=run",
        "report run --out page",
    )
    result = Result("cells", "Cells", "It is {accuracy:.2f}.", "Loss", commands, "page/loss.svg")
    run_commands(result, tmp_path / "cells")
    picture = write_picture(result, tmp_path / "cells")
    accuracy = read_figures(tmp_path / "cells")["accuracy"]
    assert list(format_result(result, picture, {"accuracy": accuracy})) == [
        "## Cells",
        f"It is {accuracy:.2f}.",
        "![Loss](gallery/cells.svg)",
        "\n".join(f"    python -m pipeline {command}" for command in commands),
    ]
    with pytest.raises(RuntimeError, match="there is no such recipe"):
        run_commands(Result("a", "A", "", "", ("+recipe=nothing",), "a.svg"), tmp_path / "a")
