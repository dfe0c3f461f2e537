"""The engine knows no recipe."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

import pytest

import pipeline

ROOT = Path(pipeline.__file__).parent
COMPONENTS = {"metric_callbacks.py", "trackers.py"}
"""Files that describe callbacks of a recipe."""
ENGINE = [file for file in sorted((ROOT / "engine").rglob("*.py")) if file.name not in COMPONENTS]
LATER = {"batches.py", "run_sink.py", "sink_folder.py", "user_step.py"}
"""Files that `pipeline.sink` imports when it runs: they read data and checkpoints."""
LOADED = [
    *(file for file in ENGINE if file.parent.name == "engine" and file.name not in LATER),
    ROOT / "engine" / "callbacks" / "callback.py",
]
RECIPE = ("hydra", "omegaconf", "pydantic", "pipeline.config", "pipeline.stages")


def module_name(file: Path) -> str:
    return ".".join(file.relative_to(ROOT.parent).with_suffix("").parts).removesuffix(".__init__")


@pytest.mark.parametrize("file", ENGINE, ids=module_name)
def test_engine_modules_import_no_recipe_packages(file: Path) -> None:
    """Neither at its top, nor for types, nor inside a function."""
    names = set()
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            names.add(node.module or "")
    refused = {name for name in names if f"{name}.".startswith(tuple(f"{r}." for r in RECIPE))}
    assert refused == set()


@pytest.mark.slow
def test_engine_loads_without_recipe_packages() -> None:
    program = (
        f"import sys, {', '.join(map(module_name, LOADED))}\n"
        f"print([name for name in {RECIPE} if name in sys.modules])"
    )
    run = subprocess.run(
        [sys.executable, "-c", program], capture_output=True, text=True, check=True
    )
    assert run.stdout == "[]\n"
