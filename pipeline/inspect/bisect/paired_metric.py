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

    A mixture is bad if it loses at least half of what the bad run loses.
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
    _values: dict[tuple[int, tuple[str, ...]], float] = field(default_factory=dict)

    def measure(self, changes: Sequence[RecipeChange]) -> tuple[float, float]:
        """Return the interval of what all changes lose; sets the threshold.

        Raises DataError if the good run isn't better.
        """
        losses = [self._lose(changes, number) for number in range(max(self.pairs, MIN_PAIRS))]
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
                losses.append(self._lose(changes, number))
                low, high = compute_interval(np.array(losses))
                if low > self.threshold:
                    return "bad"
                if high < self.threshold:
                    return "good"
        except RecipeError:
            return "other"
        self.num_uncertain += 1
        return "bad" if np.mean(losses) > self.threshold else "good"

    def _lose(self, changes: Sequence[RecipeChange], number: int) -> float:
        """Return by how much a mixture is worse than the good run, with the same seed."""
        sign = 1 if is_larger_better(self.metric) else -1
        return sign * (self._run((), number) - self._run(changes, number))

    def _run(self, changes: Sequence[RecipeChange], number: int) -> float:
        """Return the metric of a whole run. Raises DataError if it has none.

        A run that ends by an error, as by a step that isn't finite, has the worst value so far.
        """
        seed = self.good.seed + number
        key = seed, tuple(sorted(change.text for change in changes))
        if key not in self._values:
            recipe = mix_recipes(self.good, self.bad, changes)
            recipe = recipe.model_copy(update={"seed": seed, **_save_nothing(recipe)})
            self._values[key] = self._train(recipe)
        return self._values[key]

    def _train(self, recipe: Recipe) -> float:
        with tempfile.TemporaryDirectory() as folder:
            console = Console(file=io.StringIO())
            try:
                summary = run(recipe, RunOptions(run_dir=Path(folder, "run"), console=console))
            except RecipeError:
                raise
            except PipelineError:
                known = self._values.values()
                return (min if is_larger_better(self.metric) else max)(known, default=0.0)
        value = finite_number(summary.metrics.get(self.metric))
        if value is None:
            names = ", ".join(sorted(summary.metrics)) or "none"
            raise DataError(f"--metric {self.metric}: the runs don't have it; they have {names}")
        return value


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
