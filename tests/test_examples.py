"""The examples run as their first lines say, and stay short."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from tests.conftest import TINY

Command = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = [file for file in FILES if "\npython examples/" in file.read_text()]
"""Those that are no plug-ins."""
MAX_LINES = 39


def test_there_are_five_or_more() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize("script", FILES, ids=lambda script: script.stem)
def test_an_example_is_read_at_a_glance(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= MAX_LINES


@pytest.mark.slow
def test_the_flax_network_trains(command: Command) -> None:
    plugin = str(ROOT / "examples" / "flax_network.py")
    network = ["model=flax", "model.import=flax_network:Small", "model.arguments.width=4"]
    tiny = [one for one in TINY if not one.startswith("train.optimizer.lr")]
    ran = command(["--plugin", plugin, *network, *tiny, "train.steps=12"])
    assert ran.returncode == 0, ran.stderr
    assert "done" in ran.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_an_example_runs(script: Path, cache: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "done" in ran.stdout or "stopped" in ran.stdout
