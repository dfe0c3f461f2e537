"""Imports point one way, and what checks a recipe stays free of jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]

LAYERS = (
    {
        "allocator",
        "bounded_file",
        "control_groups",
        "differences",
        "errors",
        "host_memory",
        "knowledge_bank",
        "locked_folder",
        "npy",
        "plain_yaml",
        "problems",
        "real_files",
        "registry",
        "shipped",
        "signals",
        "whole_file",
    },
    {"data", "models", "training", "sink"},
    {"backends"},
    {"config"},
    {"cache", "run_directory", "observe"},
    {"stages"},
    {"weights"},
    {
        "autopsy",
        "convert_records",
        "convert",
        "diff",
        "doctor",
        "explain",
        "export",
        "infer",
        "job",
        "prepared",
        "reproduce",
        "starting_point",
        "training_run",
    },
    {"sweep"},
    {"launch"},
    {"__init__", "__main__"},
)
LEVEL = {name: level for level, names in enumerate(LAYERS) for name in names}


def _part(module: str) -> str:
    return module.split(".")[1] if "." in module else "__init__"


def _imports(file: Path) -> list[str]:
    """The project's modules that a file imports, those for type checking alone left out."""
    tree = ast.parse(file.read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    found = []
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module:
            if node.module == "pipeline":
                found += [f"pipeline.{name.name}" for name in node.names]
            else:
                found.append(node.module)
        elif isinstance(node, ast.Import):
            found += [name.name for name in node.names]
    return [name for name in found if name.split(".")[0] == "pipeline"]


def test_imports_point_from_the_command_line_to_the_ground() -> None:
    files = sorted((ROOT / "pipeline").rglob("*.py"))
    wrong = []
    for file in files:
        own = file.relative_to(ROOT / "pipeline").parts[0].removesuffix(".py")
        wrong += [
            f"{file.relative_to(ROOT)} imports {module}"
            for module in _imports(file)
            if LEVEL[_part(module)] > LEVEL[own]
        ]
    assert len(files) > 40
    assert wrong == []


def test_checking_a_recipe_imports_no_jax() -> None:
    script = (
        "import sys; from pipeline import load_recipe; load_recipe('lenet5_mnist');"
        "print([m for m in ('jax', 'flax', 'optax', 'orbax') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
