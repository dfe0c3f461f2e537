"""The page of all runs holds them, and nothing of them is read as markup."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from pipeline.study.runs.page import write_page
from pipeline.study.runs.recorded_run import RecordedRun, read_runs
from tests.study.runs.made_up import make_run, make_study


def page_of(runs: list[RecordedRun], folder: Path) -> str:
    file = folder / "runs.html"
    write_page(runs, file, folder, "accuracy")
    return file.read_text()


def content_of(page: str) -> dict:
    found = re.search(r'<script type="application/json" id="runs">(.*?)</script>', page, re.DOTALL)
    assert found is not None
    return json.loads(found[1])


def test_page_has_every_run_with_its_keys_and_curves(tmp_path: Path) -> None:
    make_run(tmp_path / "a", lr=0.1, accuracy=0.5)
    make_run(tmp_path / "b", lr=0.2, accuracy=0.9)
    make_run(tmp_path / "c", lr=0.2, accuracy=None, status="failed")
    content = content_of(page_of(read_runs(tmp_path, curves=True), tmp_path))
    assert content["columns"] == ["accuracy", "train.optimizer.lr"]
    assert [run["values"] for run in content["runs"]] == [[0.5, 0.1], [0.9, 0.2], [None, 0.2]]
    assert content["picked"] == [1, 0]
    assert content["axes"] == ["train.optimizer.lr", "accuracy"]
    assert len(content["runs"][0]["curves"]["loss"][0]) == 48


def test_keys_that_differ_come_before_other_figures(tmp_path: Path) -> None:
    make_run(tmp_path / "a", lr=0.1, hidden=16, accuracy=0.5, steps=100)
    make_run(tmp_path / "b", lr=0.2, hidden=32, accuracy=0.9, steps=200)
    content = content_of(page_of(read_runs(tmp_path, curves=False), tmp_path))
    keys = ["model.hidden", "train.optimizer.lr"]
    assert content["columns"] == ["accuracy", *keys, "parameters", "steps", "train_s"]
    assert [run["values"] for run in content["runs"]] == [
        [0.5, "[16]", 0.1, 1024, 100, 0.15],
        [0.9, "[32]", 0.2, 2048, 200, 0.3],
    ]


def test_long_names_show_their_end(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    page = page_of(read_runs(tmp_path, curves=True), tmp_path)
    assert "makeTail(run.name)" in page
    # Text that overflows to the left, and is read from left to right.
    assert re.search(r"\.tail {[^}]*text-overflow: ellipsis; direction: rtl", page)
    assert 'element("bdi", { dir: "ltr" }, text)' in page
    assert not re.search(r"\.slice\(0, \d+\)}…", page)


def test_untrusted_names_are_escaped(tmp_path: Path) -> None:
    """A run's name and its values come from whoever made it."""
    evil = "</script><script>alert(1)</script><img src=x onerror=alert(2)>"
    make_run(tmp_path / evil.replace("/", "_"), name=evil)
    make_run(tmp_path / "b", name="b")
    page = page_of(read_runs(tmp_path, curves=True), tmp_path)
    assert "alert(1)</script>" not in page
    assert "<img" not in page
    assert page.count("<script") == page.count("</script>") == 2
    assert evil in [value for run in content_of(page)["runs"] for value in run["values"]]


def test_page_loads_nothing_from_the_net(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    page = page_of(read_runs(tmp_path, curves=True), tmp_path)
    assert set(re.findall(r"https?://[^\"' )]*", page)) == {"http://www.w3.org/2000/svg"}
    assert not re.search(r"<link|@import|url\(|fetch\(|XMLHttp|innerHTML", page)


def test_keys_that_span_a_decade_have_a_logarithmic_axis(tmp_path: Path) -> None:
    for number, (lr, hidden) in enumerate([(0.01, 16), (0.03, 32), (0.1, 64)]):
        make_run(tmp_path / str(number), lr=lr, hidden=hidden, accuracy=0.05 + number * 0.4)
    content = content_of(page_of(read_runs(tmp_path, curves=False), tmp_path))
    assert content["log"] == ["train.optimizer.lr"]
    assert content_of(page_of(read_runs(tmp_path / "1", curves=False), tmp_path))["log"] == []


def test_page_fits_a_narrow_screen(tmp_path: Path) -> None:
    make_run(tmp_path / "a")
    page = page_of(read_runs(tmp_path, curves=True), tmp_path)
    style = page.partition("<style>")[2].partition("</style>")[0]
    widths = [int(px) for px in re.findall(r"[^-]min-width: (\d+)px", style)]
    assert all(width <= 280 for width in widths)
    assert "clientWidth" in page
    assert re.search(r"h1 {[^}]*overflow-wrap: anywhere", style)
    # Names leave room for a figure beside them, and stay in sight if the table is scrolled.
    narrow = style.partition("@media (max-width: 600px) {\n  .runs")[2]
    (letters,) = re.findall(r"\.tail { max-width: (\d+)ch", narrow)
    assert int(letters) <= 24
    assert re.search(r"\.runs :is\(th, td\):first-child {[^}]*position: sticky; left: 0", style)


@pytest.mark.medium
def test_page_of_a_hundred_runs_is_below_half_a_megabyte(tmp_path: Path) -> None:
    make_study(tmp_path, 100, steps=500)
    page = page_of(read_runs(tmp_path, curves=True), tmp_path)
    assert len(page) < 500_000
