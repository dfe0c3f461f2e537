"""Runs that released versions wrote, and what this version does with them.

tests/golden/make_runs.py adds a version. A later version resumes a run or refuses it with one
message, and reports, exports and compares all of them.
"""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path
from typing import Any

import pytest
from packaging.version import Version

from pipeline.__main__ import main
from tests.forked import run_forked
from tests.golden import make_runs
from tests.golden.make_runs import (
    MORE_STEPS,
    RECIPES,
    RUNS,
    call,
    copy_inputs,
    find_problem,
    find_run,
    read_loss,
    resume_run,
)
from tests.outcome import metrics
from tests.test_promises import project_version

VERSIONS = sorted(folder.name for folder in RUNS.iterdir() if folder.is_dir())
CASES = [(version, name) for version in VERSIONS for name in RECIPES]
MOST_BYTES = 3_000_000
TOLERANCE = 1e-4
"""Relative; the lowest and the newest packages round differently."""
PLUGINS = {"plug_in": ["--plugin", "components.py"], "imported": ["--plugin", "network.py"]}
PRIVATE = re.compile(rb"/(work|root|home|tmp|Users)/|\bvm\b")


def read_expected(version: str) -> dict[str, dict[str, float]]:
    expected: dict[str, dict[str, float]] = json.loads(
        (RUNS / version / "expected.json").read_text()
    )
    return expected


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with what the runs read, in which they are resumed."""
    copy_inputs(tmp_path)
    return tmp_path


def copy_run(version: str, name: str, folder: Path) -> Path:
    """Copy a run, and the run whose weights it names, into a folder."""
    for source in {name, "sinks"}:
        shutil.copytree(RUNS / version / source, folder / source)
    return find_run(folder / name)


@pytest.mark.parametrize("version", VERSIONS)
def test_version_has_every_run_and_is_small(version: str) -> None:
    assert Version(version) <= project_version()
    assert set(read_expected(version)) == set(RECIPES)
    assert {path.name for path in (RUNS / version).iterdir()} == {*RECIPES, "expected.json"}
    files = [path for path in (RUNS / version).rglob("*") if path.is_file()]
    assert sum(file.stat().st_size for file in files) < MOST_BYTES


@pytest.mark.parametrize("version", VERSIONS)
def test_run_names_no_machine_and_no_user(version: str) -> None:
    for file in (RUNS / version).rglob("*.json*"):
        assert PRIVATE.search(file.read_bytes()) is None, file
    files = list((RUNS / version).rglob("provenance.json"))
    assert {file.relative_to(RUNS / version).parts[0] for file in files} == {*RECIPES}
    for file in files:
        for process in json.loads(file.read_text())["processes"]:
            assert (process["folder"], process["machine"]["host"]) == (".", "host")
            assert process["versions"]["recipe-pipeline"] == version


@pytest.mark.parametrize("version", VERSIONS)
@pytest.mark.parametrize("name", RECIPES)
def test_losses_of_the_log_are_complete(version: str, name: str) -> None:
    expected = read_expected(version)[name]
    assert read_loss(RUNS / version / name) == expected["loss"]


def test_runs_that_can_not_be_made_are_refused(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert find_problem(["nothing"], ["nothing"], True).startswith("nothing: must be one of sinks")
    assert find_problem(["text"], ["text"], False) == (
        "text: a new version has all runs; --remake replaces those named"
    )
    monkeypatch.setattr(make_runs, "find_problem", lambda *arguments: "")
    monkeypatch.setattr(make_runs, "install", lambda folder: VERSIONS[-1])
    monkeypatch.setattr("sys.argv", ["make_runs"])
    assert make_runs.main() == 2
    monkeypatch.setattr(make_runs, "install", lambda folder: "1.9.0")
    monkeypatch.setattr("sys.argv", ["make_runs", "--remake"])
    assert make_runs.main() == 2
    assert capsys.readouterr().err.splitlines() == [
        f"{RUNS / VERSIONS[-1]}: exists; --remake replaces it",
        f"{RUNS / '1.9.0'}: doesn't exist yet",
    ]


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), CASES)
def test_golden_run_is_resumed_or_refused_with_one_message(
    version: str, name: str, folder: Path
) -> None:
    run_dir = copy_run(version, name, folder)
    try:
        resume_run(folder, name)
    except RuntimeError as error:
        text = str(error)
        assert "Traceback" not in text
        assert f"was written by recipe-pipeline {version}" in text
        assert Version(version).major != project_version().major
        return
    lines: list[dict[str, Any]] = metrics(run_dir)
    assert [line["step"] for line in lines] == list(range(1, MORE_STEPS + 1))
    expected = read_expected(version)[name]["resumed_loss"]
    assert read_loss(folder / name) == pytest.approx(expected, rel=TOLERANCE)


@pytest.mark.slow
@pytest.mark.parametrize(("version", "name"), CASES)
def test_golden_run_is_reported_and_exported(version: str, name: str, folder: Path) -> None:
    run_dir = copy_run(version, name, folder)
    plugin = PLUGINS.get(name, [])
    call(folder, [*plugin, "report", str(run_dir), "--out", "page"])
    assert (folder / "page" / "index.html").stat().st_size > 1000
    call(folder, [*plugin, "export", str(run_dir), "exported"])
    assert (folder / "exported" / "model.bin").stat().st_size > 100


@pytest.mark.slow
@pytest.mark.parametrize("version", VERSIONS)
def test_golden_runs_are_compared(version: str, folder: Path) -> None:
    shutil.copytree(RUNS / version, folder / "runs")
    expected = read_expected(version)
    listed = call(folder, ["runs", "runs", "--json"])
    assert all(name in listed for name in RECIPES)
    for name in RECIPES:
        text = call(folder, ["diff", str(find_run(folder / "runs" / name)), "runs/sinks"])
        is_same = "12 are the same, bit for bit" in text
        # Shards of a batch and streams may differ in steps before the last.
        assert is_same <= (expected[name]["loss"] == expected["sinks"]["loss"]), name
        assert is_same or "loss" in text, name
        assert is_same or name != "sinks"


@pytest.mark.slow
def test_run_of_a_newer_version_is_refused_and_its_weights_are_exported(folder: Path) -> None:
    version = VERSIONS[-1]
    run_dir = copy_run(version, "sinks", folder)
    file = run_dir / "provenance.json"
    file.write_text(file.read_text().replace(f'"{version}"', '"1.7.0"'))
    # What this version doesn't know: a key of the recipe, and another state of the host.
    recipe = run_dir / "recipe.yaml"
    recipe.write_text(f"{recipe.read_text()}unknown_key: 3\n")
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    with pytest.raises(RuntimeError) as caught:
        resume_run(folder, "sinks")
    message = str(caught.value)
    assert "sinks: was written by recipe-pipeline 1.7.0, a newer version" in message
    assert "versions from 1.7.0 to below 2.0 can resume it" in message
    assert "convert weights sinks weights.safetensors" in message
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before

    arguments = ["convert", "weights", "sinks", "weights.safetensors"]
    ended = run_forked(arguments, folder, {"XDG_CACHE_HOME": str(folder / ".cache")})
    assert ended.returncode == 0, ended.stderr
    assert "was written by recipe-pipeline 1.7.0" in ended.stderr
    assert (folder / "weights.safetensors").stat().st_size > 1000


READERS = (
    ["report", "sinks"], ["export", "sinks", "exported"], ["compare", "sinks", "sinks"],
    ["summary", "sinks"], ["infer", "sinks", "series.csv"], ["step", "sinks", "9"],
    ["dump", "sinks", "--step", "8"], ["fork", "sinks@6"], ["reproduce", "sinks"],
    ["without", "3", "sinks"], ["receipt", "sinks"], ["attack", "sinks"], ["leakage", "sinks"],
    ["fuzz", "sinks"],
)  # fmt: skip


@pytest.mark.slow
def test_commands_refuse_an_unknown_recipe_with_the_version_that_wrote_it(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    version = VERSIONS[-1]
    run_dir = copy_run(version, "sinks", folder)
    file = run_dir / "provenance.json"
    file.write_text(file.read_text().replace(f'"{version}"', '"2.1.0"'))
    recipe = run_dir / "recipe.yaml"
    recipe.write_text(f"{recipe.read_text()}unknown_key: 3\n")
    monkeypatch.chdir(folder)
    before = set(folder.rglob("*"))
    for words in READERS:
        assert main(words) == 2, words
        message = capsys.readouterr().err
        assert message.splitlines() == [
            "error: the recipe has 2 problems:",
            "  sinks: was written by recipe-pipeline 2.1.0, another major version, and versions "
            f"from 2.1.0 to below 3.0 can resume it; this is {project_version()}, which can still "
            "export its weights: python -m pipeline convert weights sinks weights.safetensors",
            "  unknown_key = 3: there is no such key",
        ], words
        assert set(folder.rglob("*")) == before, words
