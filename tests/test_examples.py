"""The examples run as their first lines say, and stay short."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from pipeline.data.text.text_format import make_tokenizer
from tests.conftest import TINY

Command = Callable[..., subprocess.CompletedProcess[str]]

ROOT = Path(__file__).parents[1]
FILES = sorted((ROOT / "examples").glob("*.py"))
SCRIPTS = [file for file in FILES if "\npython examples/" in file.read_text()]
"""Those that are no plug-ins."""
NOTEBOOKS = sorted((ROOT / "examples").glob("*.ipynb"))
MAX_LINES = 39


def test_at_least_five_examples() -> None:
    assert len(FILES) >= 5


@pytest.mark.parametrize("script", FILES, ids=lambda script: script.stem)
def test_examples_are_short(script: Path) -> None:
    assert len(script.read_text().splitlines()) <= MAX_LINES


@pytest.mark.slow
def test_flax_network_example_trains(command: Command) -> None:
    plugin = str(ROOT / "examples" / "flax_network.py")
    network = ["model=flax", "model.import=flax_network:Small", "model.arguments.width=4"]
    tiny = [one for one in TINY if not one.startswith("train.optimizer.lr")]
    ran = command(["--plugin", plugin, *network, *tiny, "train.steps=12"])
    assert ran.returncode == 0, ran.stderr
    assert "done" in ran.stdout


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
@pytest.mark.parametrize("script", SCRIPTS, ids=lambda script: script.stem)
def test_example_runs(script: Path, cache: Path, tmp_path: Path) -> None:
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True
    )
    assert ran.returncode == 0, ran.stderr
    assert "done" in ran.stdout or "stopped" in ran.stdout


@pytest.mark.medium
def test_trained_vocabulary_reads_its_texts(tmp_path: Path) -> None:
    text = "to be or not to be, that is the question: grüße\n" * 40
    (tmp_path / "text.txt").write_text(text)
    script = str(ROOT / "examples" / "train_tokenizer.py")
    for name in ("one.json", "two.json"):
        command = [sys.executable, script, name, "270", "text.txt"]
        subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    assert (tmp_path / "one.json").read_bytes() == (tmp_path / "two.json").read_bytes()
    tokenizer = make_tokenizer(str(tmp_path / "one.json"), [])
    tokens = tokenizer.encode(text)
    assert len(tokens) < 0.8 * len(text.encode())
    assert tokenizer.decode(tokens.tolist()) == text


def code_cells(notebook: Path) -> list[str]:
    """Sources of a notebook's code cells."""
    cells = json.loads(notebook.read_text())["cells"]
    return ["".join(cell["source"]) for cell in cells if cell["cell_type"] == "code"]


def test_at_least_one_notebook() -> None:
    assert len(NOTEBOOKS) >= 1


@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_is_short_and_has_no_outputs(notebook: Path) -> None:
    content = json.loads(notebook.read_text())
    assert content["nbformat"] == 4
    assert sum(len(source.splitlines()) for source in code_cells(notebook)) <= MAX_LINES
    for cell in content["cells"]:
        assert cell.get("outputs", []) == []
        assert cell.get("execution_count") is None


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
@pytest.mark.parametrize("notebook", NOTEBOOKS, ids=lambda path: path.stem)
def test_notebook_cells_run(notebook: Path, cache: Path, tmp_path: Path) -> None:
    """One after the other in one process, as Jupyter does."""
    program = "import sys\nscope = {}\nfor cell in sys.argv[1:]:\n    exec(cell, scope)\n"
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent), "PYTHONPATH": str(ROOT)}
    ran = subprocess.run(
        [sys.executable, "-W", "error", "-c", program, *code_cells(notebook)],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
    )
    assert ran.returncode == 0, ran.stderr
    predicted, true = (line.split("[")[1] for line in ran.stdout.splitlines()[-2:])
    assert len(predicted.split()) == 10
    assert sum(map(str.__eq__, predicted.split(), true.split())) >= 8
