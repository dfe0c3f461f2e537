"""Outcome of a mixture by a metric: the paired test of `better`, over whole runs of equal seeds."""

from __future__ import annotations

import io
import math
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console

from pipeline.config.recipe import Recipe
from pipeline.core.errors import DataError, PipelineError, RecipeError
from pipeline.engine.monitors.log_lines import finite_number
from pipeline.inspect.bisect.find_smallest import Outcome
from pipeline.inspect.bisect.mixtures import RecipeChange, mix_recipes
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.study.paired_test import MIN_PAIRS, compute_interval
from pipeline.study.runs.ranking import is_larger_better

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
