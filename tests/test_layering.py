"""Imports point one way, without circles, and what checks a recipe stays free of jax."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections import Counter
from collections.abc import Iterator
from functools import cache
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

LEVELS = [
    "errors",
    "plugins",
    "registry",
    "host",
    "files",
    "weights.files",
    "lowerings.problem",
    "lowerings.formulas",
    "lowerings",
    "lowerings.tune",
    "models",
    "models.layers",
    "models.modules",
    "models.torch_graph",
    "models.torch_graph.operators",
    "models.torch_graph.computation",
    "models.torch_graph.conversion",
    "models.blocks",
    "models.networks",
    "models.imported",
    "parallel",
    "data.text",
    "data",
    "data.ops",
    "data.padding",
    "data.records",
    "data.tables",
    "data.sources",
    "data.feed",
    "training",
    "training.optimizers",
    "training.optimizers.thor",
    "callbacks",
    "sink",
    "backends",
    "backends.ascend.chip",
    "backends.ascend.frontend",
    "backends.ascend.compiler",
    "backends.ascend.cost",
    "backends.ascend.memory",
    "backends.ascend.simulate",
    "backends.ascend.tune",
    "backends.ascend.report",
    "backends.ascend.pricing",
    "backends.ascend.fit",
    "backends.ascend",
    "backends.gpu",
    "backends.devices",
    "planner",
    "config",
    "cache",
    "runner.record",
    "runs",
    "launch",
    "observe",
    "stages.checkpoint",
    "stages.train",
    "autosink",
    "stages",
    "forecast",
    "weights.rules",
    "weights",
    "weights.onnx_files",
    "runner",
    "population",
    "autopsy",
    "profiler",
    "dumps",
    "compare",
    "report",
    "api",
    "parts",
    ".",
    "sweep",
    "cli.arguments",
    "cli.processes",
    "cli",
    "__main__",
]
"""Packages from the ground to the command line, each a level; `.` is the package `pipeline`."""
LEVEL = {name: level for level, name in enumerate(LEVELS)}
TOP_LEVEL = {"__init__", "__main__", "errors", "registry", "cache"}
MAX_MODULES = 25


@cache
def modules() -> dict[str, Path]:
    """Return every module of the package by its dotted name."""
    files = sorted((ROOT / "pipeline").rglob("*.py"))
    names = (".".join(file.relative_to(ROOT).with_suffix("").parts) for file in files)
    return {name.removesuffix(".__init__"): file for name, file in zip(names, files, strict=True)}


def package_of(module: str) -> str:
    """Return the folder of a module as LEVELS has it; loose modules are levels of their own."""
    is_package = modules()[module].name == "__init__.py"
    loose = module.count(".") == 1 and not is_package
    package = module if is_package or loose else module.rpartition(".")[0]
    return package.removeprefix("pipeline").removeprefix(".") or "."


@cache
def imports(module: str) -> frozenset[str]:
    """Return the project's modules that a module imports, but for those of type checking alone."""
    tree = ast.parse(modules()[module].read_text())
    for node in ast.walk(tree):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            node.body = []
    return frozenset(name for node in ast.walk(tree) for name in _named(node) if name != module)


def _named(node: ast.AST) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom) and node.module and node.module.startswith("pipeline"):
        for alias in node.names:
            full = f"{node.module}.{alias.name}"
            yield full if full in modules() else node.module
    elif isinstance(node, ast.Import):
        yield from (alias.name for alias in node.names if alias.name in modules())


def test_every_package_has_a_level() -> None:
    assert {package_of(module) for module in modules()} == set(LEVELS)
    assert len(modules()) > 300


@pytest.mark.slow
@pytest.mark.parametrize("package", LEVELS)
def test_imports_point_from_the_command_line_to_the_ground(package: str) -> None:
    wrong = [
        f"{module} imports {imported}"
        for module in modules()
        if package_of(module) == package
        for imported in sorted(imports(module))
        if LEVEL[package_of(imported)] > LEVEL[package]
    ]
    assert wrong == []


def test_no_modules_import_each_other() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter({module: imports(module) for module in modules()}).prepare()
    except CycleError as error:
        circle = list(reversed(error.args[1]))
    assert circle == []


def test_the_top_level_holds_few_modules() -> None:
    loose = {file.stem for file in (ROOT / "pipeline").glob("*.py")}
    assert loose == TOP_LEVEL


def test_a_folder_holds_no_more_modules_than_one_can_overlook() -> None:
    counts = Counter(file.parent for file in modules().values())
    assert {str(folder): n for folder, n in counts.items() if n > MAX_MODULES} == {}


def test_no_name_of_a_module_stands_for_more_than_two() -> None:
    names = Counter(file.stem for file in modules().values() if not file.stem.startswith("__"))
    assert [name for name, count in names.items() if count > 2] == []


@pytest.mark.slow
def test_checking_a_recipe_imports_no_jax() -> None:
    script = (
        "import sys; from pipeline import load_recipe; load_recipe('lenet5_mnist');"
        "print([m for m in ('jax', 'flax', 'optax', 'orbax') if m in sys.modules])"
    )
    result = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True)
    assert result.stdout.strip() == "[]", result.stderr
