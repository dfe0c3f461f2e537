"""Parts that add components and commands, and some of which are missing."""

from __future__ import annotations

import importlib
import os
import subprocess
import sys
from functools import partial
from pathlib import Path

import pytest

from pipeline.core.errors import find_absent_part
from pipeline.core.plugins.parts import (
    COMMANDS,
    import_unless_absent,
    list_entries,
    list_missing_parts,
    note_missing_part,
)
from tests.distributions import install_entries

ROOT = Path(__file__).parents[3]


def test_entries_have_their_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_entries(tmp_path / "site", "mine", {COMMANDS: {"count": "mine:count"}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (found,) = [pair for pair in list_entries(COMMANDS) if pair[1].name == "count"]
    assert (found[0], found[1].value) == ("mine", "mine:count")
    # A distribution in the working folder may be a stranger's data.
    monkeypatch.chdir(tmp_path / "site")
    assert [entry for _, entry in list_entries(COMMANDS) if entry.name == "count"] == []


@pytest.mark.slow
def test_broken_package_is_named_and_left_out_unless_a_recipe_names_it(tmp_path: Path) -> None:
    site = tmp_path / "site"
    install_entries(site, "broken", {"pipeline.components": {"broken": "broken_components"}})
    (site / "broken_components.py").write_text("raise ImportError('libmine.so is missing')\n")
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join([str(site), str(ROOT)])}
    results = [
        subprocess.run(
            [sys.executable, "-m", "pipeline", "--cfg", "job", *overrides],
            cwd=tmp_path,
            env=environment,
            capture_output=True,
            text=True,
        )
        for overrides in ([], ["dataset=broken"])
    ]
    warning = "warning: broken: can't be imported: ImportError: libmine.so is missing\n"
    assert (results[0].returncode, results[0].stderr) == (0, warning)
    assert results[1].returncode == 2
    assert "broken: can't be imported: ImportError: libmine.so is missing" in results[1].stderr


@pytest.fixture
def missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.core.plugins.parts._missing", {})


def load(name: str) -> None:
    import_unless_absent(name, partial(importlib.import_module, name))


@pytest.mark.usefixtures("missing")
def test_absent_part_is_remembered_by_the_module_that_needs_it() -> None:
    load("pipeline.backends.nothing")
    load("pipeline.core.errors")
    assert list_missing_parts() == {
        "pipeline.backends.nothing": "pipeline.backends.nothing isn't installed"
    }


@pytest.mark.usefixtures("missing")
def test_missing_package_of_others_is_an_error() -> None:
    with pytest.raises(ModuleNotFoundError, match="nothing_of_others"):
        load("nothing_of_others")
    assert list_missing_parts() == {}


@pytest.mark.usefixtures("missing")
def test_broken_package_has_its_reason() -> None:
    note_missing_part("mine", "can't be imported: ImportError: no")
    assert list_missing_parts() == {"mine": "can't be imported: ImportError: no"}


@pytest.mark.parametrize(
    ("error", "part"),
    [
        (ModuleNotFoundError("no", name="pipeline.backends.ascend"), "pipeline.backends.ascend"),
        (ModuleNotFoundError("no", name="pipeline_of_mine.parts"), None),
        (ModuleNotFoundError("no"), None),
        (ImportError("no", name="pipeline.backends.ascend"), None),
    ],
)
def test_only_modules_of_the_package_are_absent_parts(error: Exception, part: str | None) -> None:
    assert find_absent_part(error) == part
