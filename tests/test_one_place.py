"""Metrics of a step, paths of checkpoints and microbatches have one place each, and no second."""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.test_layering import modules

RECORD = "state.py"
CHECKPOINT = "checkpoint_folder.py"
MICROBATCHES = "microbatches.py"
COLUMNS = {"loss", "learning_rate", "grad_norm", "loss_scale", "skipped"}
FOLDERS = r"(root|FOLDER|CHECKPOINTS|checkpoints\"?)"
STEP_PATHS = rf"{FOLDERS} / (str\(|f?\"\{{step|step)|int\((path|folder)\.name\)"
PIECES = r"(\baccumulate|accumulate_steps|num_microbatches)"
MICROBATCH_RULES = rf"(%|//|\*) [\w.]*{PIECES}\b|[\w.]*{PIECES} \*|reshape\([\w.]*{PIECES}\b"


def lines_that_match(pattern: str, place: str) -> list[str]:
    """List lines of the package that match, except those of one module."""
    return [
        f"{file}:{number}: {line.strip()}"
        for file in modules().values()
        if file.name != place
        for number, line in enumerate(file.read_text().splitlines(), start=1)
        if re.search(pattern, line)
    ]


def lists_of_columns(tree: ast.AST) -> Iterator[int]:
    """Yield the lines of sequences that name at least three metrics of a step."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Tuple | ast.List | ast.Set):
            names = {element.value for element in node.elts if isinstance(element, ast.Constant)}
            if len(names & COLUMNS) > 2:
                yield node.lineno


@pytest.mark.medium
def test_step_metrics_are_listed_once() -> None:
    lists = [
        f"{file}:{line}"
        for file in modules().values()
        if file.name not in (RECORD, "telemetry.py")
        for line in lists_of_columns(ast.parse(file.read_text()))
    ]
    assert lists == []


@pytest.mark.medium
def test_checkpoint_path_is_built_in_one_place() -> None:
    assert lines_that_match(STEP_PATHS, CHECKPOINT) == []


@pytest.mark.medium
def test_microbatches_are_split_in_one_place() -> None:
    assert lines_that_match(MICROBATCH_RULES, MICROBATCHES) == []


@pytest.mark.parametrize(
    ("pattern", "line"),
    [
        (STEP_PATHS, "folder = root / str(step)"),
        (STEP_PATHS, 'folder = run_dir / FOLDER / f"{step}"'),
        (STEP_PATHS, "step = int(path.name)"),
        (MICROBATCH_RULES, "size = batch // config.accumulate"),
        (MICROBATCH_RULES, "if size % train.accumulate_steps:"),
        (MICROBATCH_RULES, "array.reshape(config.accumulate, -1)"),
    ],
)
def test_second_place_is_detected(pattern: str, line: str) -> None:
    assert re.search(pattern, line)


def test_second_list_is_detected() -> None:
    assert list(lists_of_columns(ast.parse("NAMES = ('loss', 'grad_norm', 'skipped')"))) == [1]


def test_places_exist() -> None:
    names = [Path(file).name for file in modules().values()]
    assert all(names.count(place) == 1 for place in (RECORD, CHECKPOINT, MICROBATCHES))
