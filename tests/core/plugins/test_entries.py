"""Entry points by which other distributions add components and commands."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline.core.plugins.entries import COMMANDS, get_distribution, list_entries
from tests.distributions import install_entries

ROOT = Path(__file__).parents[3]


def test_entries_have_their_distribution(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    install_entries(tmp_path / "site", "mine", {COMMANDS: {"count": "mine:count"}})
    monkeypatch.syspath_prepend(str(tmp_path / "site"))
    (entry,) = [entry for entry in list_entries(COMMANDS) if entry.name == "count"]
    assert (entry.value, get_distribution(entry)) == ("mine:count", "mine")
    # A distribution in the working folder may be a stranger's data.
    monkeypatch.chdir(tmp_path / "site")
    assert [entry for entry in list_entries(COMMANDS) if entry.name == "count"] == []


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
    warning = "warning: broken, without which this goes on: ImportError: libmine.so is missing\n"
    assert (results[0].returncode, results[0].stderr) == (0, warning)
    assert results[1].returncode == 2
    assert "broken: can't be imported: ImportError: libmine.so is missing" in results[1].stderr
