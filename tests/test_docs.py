"""The examples in the documents run, and say what they promise."""

from __future__ import annotations

import ast
import re
import shlex
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import load_recipe

ROOT = Path(__file__).parents[1]
RUNS = re.findall(
    r"^    python -m pipeline( \+recipe=[^#\n]*)", (ROOT / "README.md").read_text(), re.MULTILINE
)
EXAMPLES = re.findall(
    r"^```python\n(.*?)^```$",
    (ROOT / "docs" / "ascend910.md").read_text(),
    re.MULTILINE | re.DOTALL,
)

GOLDEN = ROOT / "tests" / "golden"
SCRIPTS = re.findall(
    r"^\| `(make_\w+\.py)` \| ([^|]+) \| \d+ \| ([^|]+) \|$",
    (ROOT / "CONTRIBUTING.md").read_text(),
    re.MULTILINE,
)
"""Of golden values: the script, what it needs and the files that it writes."""


def test_there_are_two_examples() -> None:
    assert len(EXAMPLES) == 2


@pytest.mark.parametrize("number", range(len(EXAMPLES)), ids=["flax", "by hand"])
def test_an_example_runs_as_it_stands(number: int, tmp_path: Path) -> None:
    (tmp_path / "example.py").write_text(EXAMPLES[number])
    said = subprocess.run(
        [sys.executable, "-W", "error", "example.py"], cwd=tmp_path, capture_output=True, text=True
    )
    assert (said.returncode, said.stderr) == (0, "")
    match = re.match(r"modelled: ([\d.]+) ms a step", said.stdout)
    assert match is not None
    assert float(match[1]) > 0
    if "save_trace" in EXAMPLES[number]:
        assert (tmp_path / "net_trace.json").stat().st_size > 1000
        assert "<svg" in (tmp_path / "net_timeline.html").read_text()


def test_the_readme_has_runs() -> None:
    assert len(RUNS) >= 3


@pytest.mark.parametrize("command", RUNS, ids=str.strip)
def test_a_run_of_the_readme_is_a_valid_recipe(command: str) -> None:
    recipe, *overrides = shlex.split(command)
    name = recipe.removeprefix("+recipe=")
    assert load_recipe(name, overrides).name == name


def test_every_script_of_golden_values_is_in_the_table() -> None:
    assert [row[0] for row in SCRIPTS] == sorted(path.name for path in GOLDEN.glob("make_*.py"))


@pytest.mark.parametrize(("script", "needs", "files"), SCRIPTS, ids=[row[0] for row in SCRIPTS])
def test_a_script_of_golden_values_says_what_it_ran_with(
    script: str, needs: str, files: str
) -> None:
    said = ast.get_docstring(ast.parse((GOLDEN / script).read_text())) or ""
    for package in re.findall(r"\w+ [\d.]+", needs):
        assert package in " ".join(said.split())
    for name in re.findall("`([^`]+)`", files):
        assert any(GOLDEN.rglob(name.rstrip("/")))
