"""Mixtures of two runs: the recipe of one with some keys of the other, and their first steps."""

from __future__ import annotations

import copy
import io
import shutil
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console

from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.files.tree_diff import TreePath, find_value, format_key
from pipeline.core.files.value_text import show
from pipeline.engine.monitors.log_lines import METRICS
from pipeline.inspect.bisect.find_smallest import Outcome
from pipeline.stages.record.recorded_recipe import FREE_TO_CHANGE, LENGTH, find_changes
from pipeline.stages.record.run_directory import LOWERINGS
from pipeline.stages.record.run_record import compare_steps
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions

FREE = (*(path for path in FREE_TO_CHANGE if path not in LENGTH), ("name",))
"""Keys that change no step."""
NAME = "name"


@dataclass(frozen=True)
class RecipeChange:
    """Keys that change together: a key, a list, a component with its keys, or the length."""

    paths: tuple[TreePath, ...]
    text: str
    """Both values, for messages."""


def list_changes(good: Recipe, bad: Recipe) -> list[RecipeChange]:
    """Return the changes from one recipe to another that may change a step."""
    tree, other = good.model_dump(mode="json"), bad.model_dump(mode="json")
    paths: dict[tuple[TreePath, ...], None] = {}
    for difference in find_changes(other, tree, FREE):
        if difference.path in LENGTH:
            paths[LENGTH] = None
        else:
            paths[(_widen(difference.path, tree, other),)] = None
    # A component contains those below it.
    wide = [
        group
        for group in paths
        if not any(
            group != outer and group[0][: len(outer[0])] == outer[0]
            for outer in paths
            if len(outer) == 1
        )
    ]
    return [RecipeChange(group, _describe(group, tree, other)) for group in wide]


def _widen(path: TreePath, tree: Any, other: Any) -> TreePath:
    """Return the path of the list or of the component of another name in which a key is."""
    for length in range(1, len(path)):
        part = path[:length]
        if isinstance(path[length], int):
            return part
        names = [find_value(node, (*part, NAME)) for node in (tree, other)]
        if names[0] != names[1]:
            return part
    return path


def _describe(paths: Sequence[TreePath], tree: Any, other: Any) -> str:
    texts = []
    for path in paths:
        one, two = (find_value(node, path) for node in (tree, other))
        if one == two:
            continue
        if isinstance(one, dict) and isinstance(two, dict):
            path, one, two = (*path, NAME), one.get(NAME), two.get(NAME)
        texts.append(f"{format_key(path)} = {show(two)}: was {show(one)}")
    return "; ".join(texts)


def mix_recipes(good: Recipe, bad: Recipe, changes: Sequence[RecipeChange]) -> Recipe:
    """Return the recipe of the good run with changes. Raises RecipeError if they don't fit."""
    tree = copy.deepcopy(good.whole_tree())
    other = bad.whole_tree()
    for change in changes:
        for path in change.paths:
            value = find_value(other, path)
            parent = find_value(tree, path[:-1]) if len(path) > 1 else tree
            if not isinstance(parent, dict):
                raise RecipeError(f"{format_key(path)}: has no place in the other recipe")
            parent[str(path[-1])] = copy.deepcopy(value)
    return check_tree(tree, length_replaced=True)


@dataclass(eq=False)
class FirstSteps:
    """The first steps of mixtures, compared with two runs' first steps."""

    good_dir: Path
    bad_dir: Path
    good: Recipe
    bad: Recipe
    steps: int
    """Steps to compare: up to the first that differs between the runs."""
    num_runs: int = 0

    def probe(self, changes: Sequence[RecipeChange]) -> Outcome:
        """Return whether the good run with changes has the numbers of one of the runs, to the
        bit. A mixture that can't be a recipe, or ends before, has neither's."""
        self.num_runs += 1
        try:
            recipe = mix_recipes(self.good, self.bad, changes)
        except RecipeError:
            return "other"
        with tempfile.TemporaryDirectory() as folder:
            run_dir = Path(folder) / "run"
            run_dir.mkdir()
            self._copy_lowerings(run_dir, changes)
            try:
                with Console(file=io.StringIO()).capture():
                    options = RunOptions(run_dir=run_dir, console=Console(file=io.StringIO()))
                    run(_shorten(recipe, self.steps), options)
            except PipelineError:
                pass  # a non-finite step is in the log
            log = run_dir / METRICS
            if not log.is_file():
                return "other"
            if self._is_same(log, self.bad_dir):
                return "bad"
            return "good" if self._is_same(log, self.good_dir) else "other"

    def _is_same(self, log: Path, run_dir: Path) -> bool:
        comparison = compare_steps(log, run_dir / METRICS)
        return comparison.first is None and comparison.steps == self.steps

    def _copy_lowerings(self, run_dir: Path, changes: Sequence[RecipeChange]) -> None:
        """Copy the choice of lowerings of the run whose network the mixture has."""
        is_bad = any(change.paths[0][0] == "model" for change in changes)
        source = (self.bad_dir if is_bad else self.good_dir) / LOWERINGS
        if source.is_file():
            shutil.copyfile(source, run_dir / LOWERINGS)


def _shorten(recipe: Recipe, steps: int) -> Recipe:
    """Return a recipe that only trains, for `steps` steps of its whole length."""
    train = recipe.train.model_copy(update={"end_step": steps, "resume": None})
    update: dict[str, Any] = {
        "train": train,
        "stages": tuple(stage for stage in recipe.stages if stage not in ("checkpoint", "eval")),
        "monitor": recipe.monitor.model_copy(update={"tensorboard": False}),
    }
    if not recipe.train.callbacks and recipe.monitor.early_stop.metric is None:
        never = {"every_steps": None, "every_epochs": None, "every_seconds": None}
        update["eval"] = recipe.eval.model_copy(update=never)
    return recipe.model_copy(update=update)
