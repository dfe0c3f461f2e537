"""The commands of the tutorial run in their order, and print the lines that it shows."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from tests.forked import run_forked

TUTORIAL = (Path(__file__).parents[1] / "docs" / "tutorial.md").read_text()
SCRIPTS = re.findall(r"^```python\n(.*?)^```$", TUTORIAL, re.MULTILINE | re.DOTALL)
STEPS = re.findall(
    r"^    \$ python (.+)\n((?:    [^$].*\n)*)", TUTORIAL.replace("\\\n", ""), re.MULTILINE
)
"""Commands without `python`, each with the lines that it prints."""


def test_tutorial_has_a_script_and_commands() -> None:
    assert len(SCRIPTS) == 1
    commands = [command for command, _ in STEPS]
    assert len(commands) == TUTORIAL.count("\n    $ ")
    for word in ("dataset=image_folder", "report", "infer", "--to onnx"):
        assert any(word in command for command in commands)
    assert len(TUTORIAL.split()) < 700


@pytest.mark.slow
@pytest.mark.usefixtures("long_runs")
def test_tutorial_commands_print_the_shown_output(cache: Path, tmp_path: Path) -> None:
    pytest.importorskip("onnxruntime")
    (tmp_path / "shapes.py").write_text(SCRIPTS[0])
    environment = {**os.environ, "XDG_CACHE_HOME": str(cache.parent)}
    for command, shown in STEPS:
        words = shlex.split(command)
        if words[:2] == ["-m", "pipeline"]:
            result = run_forked(words[2:], tmp_path, environment, timeout=400)
        else:
            result = subprocess.run(
                [sys.executable, *words],
                cwd=tmp_path,
                env=environment,
                capture_output=True,
                text=True,
                timeout=400,
            )
        assert result.returncode == 0, (command, result.stderr)
        printed = "".join(f"{_without_results(line)}\n" for line in result.stdout.splitlines())
        missing = [line for line in shown.splitlines() if _make_pattern(line) not in printed]
        assert missing == [], (command, result.stdout)
    assert (tmp_path / "first/report/index.html").is_file()
    assert (tmp_path / "exported/model.onnx").is_file()


def _make_pattern(shown: str) -> str:
    """The beginning of a line that ends with dots in the tutorial; a whole line otherwise."""
    line = _without_results(shown)
    return line.removesuffix("...") if line.endswith("...") else f"{line}\n"


def _without_results(line: str) -> str:
    """A line without losses, accuracies and counts of mistakes, which differ by machine."""
    line = re.sub(r"[\d.]+ ms a step", "_ ms a step", line.strip())
    line = re.sub(r"\d+\.\d+(e-\d+)?", "_", line)
    return re.sub(r"wrong \d+", "wrong _", line)
