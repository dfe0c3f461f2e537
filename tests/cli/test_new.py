"""`new` makes a project that trains, and that is refused without its plug-in."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest

from pipeline.core.errors import RunError, UsageError
from pipeline.core.files.paths import PROJECT
from tests.command_line import new as main

FILES = [
    "README.md",
    "components.py",
    "recipes/own.yaml",
    "tests/conftest.py",
    "tests/test_components.py",
]
Command = Callable[[Sequence[str]], subprocess.CompletedProcess[str]]


@pytest.fixture(autouse=True)
def _in_folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def test_project_has_example_files_under_its_name(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["own"]) == 0
    made = sorted(path for path in (tmp_path / "own").rglob("*") if path.is_file())
    assert [str(path.relative_to(tmp_path / "own")) for path in made] == FILES
    texts = [path.read_text() for path in made]
    assert not any("demo" in text for text in texts)
    assert "+recipe=own" in texts[0]
    said = capsys.readouterr().out.splitlines()
    assert said[-1] == "train: cd own && python -m pipeline --plugin components.py +recipe=own"


def test_all_files_of_the_example_are_copied() -> None:
    """So that nothing is added there and forgotten in the command."""
    main(["demo"])
    shipped = {
        str(path.relative_to(PROJECT))
        for path in PROJECT.rglob("*")
        if path.is_file() and path.suffix in (".py", ".yaml", ".md")
    }
    assert {str(path.relative_to("demo")) for path in Path("demo").rglob("*.*")} == shipped
    for name in shipped:
        assert (Path("demo") / name).read_text() == (PROJECT / name).read_text()


@pytest.mark.parametrize(
    "name",
    ["", "a b", "../a", "a/b", "1a", "-a", ".", "a.yaml", "null", "True", "NaN", "é", "recipe="],
)
def test_invalid_name_is_refused(name: str, tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="must be a name of letters"):
        main(["--", name])
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("names", [[], ["a", "b"]], ids=str)
def test_one_name_is_required(names: list[str]) -> None:
    with pytest.raises(UsageError, match="new takes NAME"):
        main(names)


@pytest.mark.parametrize("kind", ["file", "folder"])
def test_existing_path_is_not_overwritten(kind: str, tmp_path: Path) -> None:
    there = tmp_path / "own"
    there.write_text("mine") if kind == "file" else there.mkdir()
    with pytest.raises(RunError, match="own: already exists; choose another name"):
        main(["own"])
    assert there.is_dir() == (kind == "folder")


def test_uncreatable_folder_is_an_error(tmp_path: Path) -> None:
    with pytest.raises(RunError, match="can't be made: File name too long"):
        main(["a" * 300])


def test_full_disk_leaves_no_part_of_a_project(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next attempt would be told that it exists."""

    def refuse(path: Path, *_: object, **__: object) -> None:
        raise OSError(errno.ENOSPC, "No space left on device", str(path))

    monkeypatch.setattr(Path, "write_text", refuse)
    with pytest.raises(RunError, match="own: can't be made: No space left on device"):
        main(["own"])
    assert list(tmp_path.iterdir()) == []


def test_help_of_new_command_is_printed(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--help"]) == 0
    assert capsys.readouterr().out.startswith("usage: python -m pipeline new NAME")


def in_project(command: Command, *arguments: str) -> subprocess.CompletedProcess[str]:
    return command([*arguments, "+recipe=own", "train.epochs=1", "hydra.run.dir=run"])


@pytest.mark.slow
def test_project_trains_only_with_its_plugin(tmp_path: Path, forked: Command) -> None:
    assert main(["own"]) == 0
    for file in (tmp_path / "own").iterdir():
        file.rename(tmp_path / file.name)
    refused = in_project(forked)
    assert refused.returncode == 2
    assert "a custom component needs --plugin FILE" in refused.stderr
    assert not (tmp_path / "run").exists()
    trained = in_project(forked, "--plugin", "components.py")
    assert trained.returncode == 0, trained.stderr
    summary = json.loads((tmp_path / "run" / "summary.json").read_text())
    assert summary["metrics"]["within_one"] >= summary["metrics"]["accuracy"]
    (process,) = json.loads((tmp_path / "run" / "provenance.json").read_text())["processes"]
    assert process["plugins"].keys() == {"components"}
    assert "--plugin components.py" in process["command"]


@pytest.mark.slow
def test_project_tests_pass(cache: Path, tmp_path: Path) -> None:
    assert main(["own"]) == 0
    result = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider"],
        cwd=tmp_path / "own",
        env={**os.environ, "XDG_CACHE_HOME": str(cache.parent)},
        capture_output=True,
        text=True,
    )
    assert "2 passed" in result.stdout, result.stdout
