"""The check of pages by axe-core: what is missing is said in a line, and faults are found."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from pipeline.cli.commands.root import ROOT
from tests.accessibility import PAGES, list_pages, main

AXE = """
var axe = {run: async () => ({violations: document.querySelector("img:not([alt])") ? [
  {id: "image-alt", help: "Images must have alternative text", nodes: [{target: ["img"]}]}] : []})};
"""
"""A stand-in for axe-core, which the tests don't download: it has one of its rules."""


def test_absence_of_a_part_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    axe = tmp_path / "axe.min.js"
    page = str(tmp_path)
    assert main([page, "--axe", str(axe), "--chromium", "no-browser"]) == 2
    assert capsys.readouterr().err == "no-browser: no such program; --chromium names Chromium\n"
    assert main([page, "--axe", str(axe), "--chromium", "true"]) == 2
    assert capsys.readouterr().err == f"{axe}: no such file; `npm install axe-core` brings it\n"
    axe.write_text(AXE)
    assert main([page, "--axe", str(axe), "--chromium", "true"]) == 2
    assert capsys.readouterr().err == f"{page}: has no HTML files\n"
    assert main([f"{page}/site", "--axe", str(axe), "--chromium", "true"]) == 2
    assert capsys.readouterr().err == f"{page}/site: there is no such file or folder\n"
    assert main(["--axe", str(axe), "--chromium", "true"]) == 2
    assert capsys.readouterr().err == "no pages: name files or folders with HTML\n"


def test_pages_are_those_of_a_file_or_a_folder(tmp_path: Path) -> None:
    (tmp_path / "deep").mkdir()
    first, second = tmp_path / "a.html", tmp_path / "deep" / "b.html"
    for page in (first, second):
        page.write_text("<p>")
    assert list_pages(first) == (tmp_path, [first])
    assert list_pages(tmp_path) == (tmp_path, [first, second])


def test_arguments_of_commands_that_write_pages_are_valid() -> None:
    named = [words for words in PAGES.values() if words[0] in ROOT.commands]
    assert len(named) > 5
    for name, *arguments in named:
        ROOT.commands[name].make_context(name, arguments)


@pytest.mark.slow
def test_violation_and_wide_page_are_found(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    if shutil.which("chromium") is None:
        pytest.skip("Chromium isn't installed")
    axe = tmp_path / "axe.min.js"
    axe.write_text(AXE)
    pages = tmp_path / "pages"
    pages.mkdir()
    good, bad = pages / "good.html", pages / "with space.html"
    head = "<!doctype html><meta name=viewport content='width=device-width'>"
    # The index of a search isn't loaded: this one would add a picture without a text.
    (pages / "search_index.js").write_text("document.body.append(new Image())")
    good.write_text(f"{head}<img alt='a picture'><script src='search_index.js'></script>")
    assert main([str(pages), "--axe", str(axe)]) == 0
    assert capsys.readouterr().out == "1 pages: 0 violations\n"
    bad.write_text(f"{head}<img><div style='width: 900px'>wide</div>")
    assert main([str(pages), "--axe", str(axe), "--pictures", str(tmp_path / "png")]) == 1
    lines = capsys.readouterr().out.splitlines()
    fault = "image-alt: Images must have alternative text: img"
    assert lines[:2] == [f"{bad} at 1400, {scheme}: {fault}" for scheme in ("light", "dark")]
    assert lines[3].startswith(f"{bad} at 390, light: wider than its window: 9")
    assert lines[-1] == "2 pages: 6 violations"
    assert len(list((tmp_path / "png").iterdir())) == 8
