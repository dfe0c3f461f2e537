"""Modules and lines that a module brings along by its top-level imports, and fields of two types.

    python -m tests.core_budget [MODULE ...]

Imports inside functions and for type checking don't count: their modules are loaded by the runs
that use them, or by none.
"""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator, Sequence
from dataclasses import fields
from functools import cache
from pathlib import Path

from pipeline.training.state import TrainState
from pipeline.training.step_config import StepConfig
from tests.test_layering import modules

WATCHED = (
    "engine.loop",
    "config.recipe",
    "training.state",
    "training.step",
    "stages.run",
    "cli.train",
)


_LOADED = """
import sys
from pipeline.__main__ import main
status = main(sys.argv[1:])
print(*(name for name in sys.modules if name.partition(".")[0] == "pipeline"))
sys.exit(status)
"""


def list_loaded(overrides: Sequence[str], run_dir: Path) -> frozenset[str]:
    """Return the modules that a run loads. Raises CalledProcessError if it fails."""
    result = subprocess.run(
        [sys.executable, "-c", _LOADED, *overrides, f"hydra.run.dir={run_dir}"],
        capture_output=True,
        text=True,
        check=True,
    )
    return frozenset(result.stdout.splitlines()[-1].split()) & modules().keys()


def list_targets(module: str) -> set[str]:
    """Return the project's modules that a module imports at its top level."""
    return set(_iterate_imports(ast.parse(modules()[module].read_text()).body)) & modules().keys()


def _iterate_imports(body: Sequence[ast.stmt]) -> Iterator[str]:
    for node in body:
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                for alias in names:
                    full = f"{module}.{alias.name}"
                    yield full if full in modules() else module
            case ast.Import(names=names):
                yield from (alias.name for alias in names)
            case ast.If(test=ast.Name(id="TYPE_CHECKING")):
                pass
            case ast.If() | ast.Try() | ast.ClassDef() | ast.With():
                yield from _iterate_imports(node.body)
                yield from _iterate_imports(getattr(node, "orelse", []))


@cache
def find_closure(module: str) -> frozenset[str]:
    """Return a module, those that it brings along, and the packages that they are in."""
    done: set[str] = set()
    waiting = [module]
    while waiting:
        name = waiting.pop()
        if name in done or name not in modules():
            continue
        done.add(name)
        for target in (name, *list_targets(name)):
            parts = target.split(".")
            waiting += [".".join(parts[:length]) for length in range(1, len(parts) + 1)]
    return frozenset(done)


def count_lines(names: frozenset[str]) -> int:
    return sum(modules()[name].read_text().count("\n") for name in names)


def main(names: Sequence[str]) -> None:
    for name in names or WATCHED:
        closure = find_closure(f"pipeline.{name}")
        print(f"{name:16} {len(closure):4} modules {count_lines(closure):7,} lines")
    print(f"import targets of stages.run: {len(list_targets('pipeline.stages.run'))}")
    for kind in (StepConfig, TrainState):
        print(f"fields of {kind.__name__}: {len(fields(kind))}")


if __name__ == "__main__":
    main(sys.argv[1:])
