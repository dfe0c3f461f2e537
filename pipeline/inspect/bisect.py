"""Search for the smallest set of changed keys that turns one run into another: mixtures of their
recipes, and the outcome of a mixture by its first steps or by a paired test of a metric."""

from __future__ import annotations

import copy
import io
import math
import shutil
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal, TypeVar

import numpy as np
from rich.console import Console

from pipeline.config.compose import check_tree
from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, PipelineError, RecipeError
from pipeline.core.files.tree_diff import TreePath, find_value, format_key
from pipeline.core.files.value_text import show
from pipeline.engine.monitors.log_lines import METRICS, finite_number
from pipeline.stages.record.recorded_recipe import FREE_TO_CHANGE, LENGTH, find_changes
from pipeline.stages.record.run_directory import LOWERINGS
from pipeline.stages.record.run_record import compare_steps
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.study.paired_test import MIN_PAIRS, compute_interval
from pipeline.study.runs.ranking import is_larger_better

T = TypeVar("T")
Outcome = Literal["good", "bad", "other"]
"""Whether a mixture has the numbers of the good run, of the bad one, or neither's."""
Probe = Callable[[Sequence[T]], Outcome]
"""Returns the outcome of the good run with some of the changes."""


def find_smallest(changes: Sequence[T], probe: Probe[T]) -> list[T]:
    """Return the smallest set of changes with which the good run has the bad run's numbers.

    All of `changes` together must have the outcome bad, and none of them good. For a set of k
    changes among n, `probe` is called at most k (ceil(log2 n) + 1) times.
    """
    required: list[T] = []
    candidates = list(changes)
    while candidates:
        if required and probe(required) == "bad":
            break
        # Of the first `low` candidates too few turn the result, of the first `high` enough.
        low, high = 0, len(candidates)
        while high - low > 1:
            middle = (low + high) // 2
            if probe([*candidates[:middle], *required]) == "bad":
                high = middle
            else:
                low = middle
        required.insert(0, candidates[high - 1])
        candidates = candidates[: high - 1]
    return required


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
    # A rollback needs checkpoints, which are written to the run directory alone.
    left_out = ("eval",) if recipe.train.on_nan.name == "rollback" else ("checkpoint", "eval")
    local = {"directory": None, "mirror": None}
    update: dict[str, Any] = {
        "train": train,
        "stages": tuple(stage for stage in recipe.stages if stage not in left_out),
        "checkpoint": recipe.checkpoint.model_copy(update=local),
        "monitor": recipe.monitor.model_copy(update={"tensorboard": False}),
    }
    if not recipe.train.callbacks and recipe.monitor.early_stop.metric is None:
        never = {"every_steps": None, "every_epochs": None, "every_seconds": None}
        update["eval"] = recipe.eval.model_copy(update=never)
    return recipe.model_copy(update=update)


SEED = ("seed",)
"""The key that pairs have in common, so it isn't a change."""


@dataclass(eq=False)
class PairedMetric:
    """Mixtures compared with the good run by a metric, in pairs of equal seeds.

    A mixture is bad if it loses at least half of what the bad run loses, or if it fails, as by a
    step that isn't finite. Of a bad run that fails, only mixtures that fail are bad.
    """

    good: Recipe
    bad: Recipe
    metric: str
    pairs: int
    """Most pairs of a comparison."""
    threshold: float = math.nan
    """Half of the mean loss of the bad run, set by `measure`."""
    num_comparisons: int = 0
    num_uncertain: int = 0
    """Comparisons that the pairs didn't decide, so that the mean did."""
    _values: dict[tuple[int, tuple[str, ...]], float | None] = field(default_factory=dict)

    def measure(self, changes: Sequence[RecipeChange]) -> tuple[float, float]:
        """Return the interval of what all changes lose, infinite if they fail; sets the threshold.

        Raises DataError if the good run fails or isn't better.
        """
        losses: list[float] = []
        for number in range(max(self.pairs, MIN_PAIRS)):
            loss = self._lose(changes, number)
            if loss is None:
                self.threshold = math.inf
                return math.inf, math.inf
            losses.append(loss)
        low, high = compute_interval(np.array(losses))
        if not low > 0:
            worse = "the other one is better" if high < 0 else "no difference is found"
            raise DataError(
                f"{self.metric} of the bad run is worse by {low:.2g} to {high:.2g} after "
                f"{len(losses)} pairs of seeds: {worse}, so there is nothing to search"
            )
        self.threshold = float(np.mean(losses)) / 2
        return low, high

    def probe(self, changes: Sequence[RecipeChange]) -> Outcome:
        """Return whether the good run with changes loses at least the threshold."""
        self.num_comparisons += 1
        losses: list[float] = []
        try:
            for number in range(max(self.pairs, MIN_PAIRS)):
                loss = self._lose(changes, number)
                if loss is None:
                    return "bad"
                losses.append(loss)
                low, high = compute_interval(np.array(losses))
                if low > self.threshold:
                    return "bad"
                if high < self.threshold:
                    return "good"
        except RecipeError:
            return "other"
        self.num_uncertain += math.isfinite(self.threshold)
        return "bad" if np.mean(losses) > self.threshold else "good"

    def _lose(self, changes: Sequence[RecipeChange], number: int) -> float | None:
        """Return by how much a mixture is worse than the good run, with the same seed; None if it
        fails. Raises DataError if the good run fails."""
        value, mixed = self._run((), number), self._run(changes, number)
        if value is None:
            raise DataError(f"the good run fails with seed {self.good.seed + number}")
        sign = 1 if is_larger_better(self.metric) else -1
        return None if mixed is None else sign * (value - mixed)

    def _run(self, changes: Sequence[RecipeChange], number: int) -> float | None:
        """Return the metric of a whole run; None for a run that ends by an error, or with a metric
        that isn't finite. Raises DataError if it has none."""
        seed = self.good.seed + number
        key = seed, tuple(sorted(change.text for change in changes))
        if key not in self._values:
            recipe = mix_recipes(self.good, self.bad, changes)
            recipe = recipe.model_copy(update={"seed": seed, **_save_nothing(recipe)})
            self._values[key] = self._train(recipe)
        return self._values[key]

    def _train(self, recipe: Recipe) -> float | None:
        with tempfile.TemporaryDirectory() as folder:
            console = Console(file=io.StringIO())
            try:
                summary = run(recipe, RunOptions(run_dir=Path(folder, "run"), console=console))
            except RecipeError:
                raise
            except PipelineError:
                return None
        if self.metric not in summary.metrics:
            names = ", ".join(sorted(summary.metrics)) or "none"
            raise DataError(f"--metric {self.metric}: the runs don't have it; they have {names}")
        return finite_number(summary.metrics[self.metric])


def _save_nothing(recipe: Recipe) -> dict[str, Any]:
    """Return the keys with which a run trains and evaluates, but saves nothing."""
    return {
        "stages": tuple(stage for stage in recipe.stages if stage != "checkpoint"),
        "monitor": recipe.monitor.model_copy(update={"tensorboard": False}),
        "train": recipe.train.model_copy(update={"resume": None}),
    }


def without_seed(changes: Sequence[RecipeChange]) -> list[RecipeChange]:
    """Return the changes that pairs of equal seeds can differ in."""
    return [change for change in changes if change.paths != (SEED,)]
