"""Settings of repeated runs that are as good as the best, by the paired test over equal seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.core.errors import printable
from pipeline.core.files.value_text import join_first
from pipeline.study.paired_test import MIN_PAIRS, count_pairs_to_decide
from pipeline.study.runs.ranking import is_larger_better

SEED = "seed"
NUM_SHOWN = 5


@dataclass(frozen=True)
class Ties:
    """The settings with the best mean, and other settings that the test can't distinguish."""

    best: str
    mean: float
    """Mean of the metric over the seeds of `best`."""
    seeds: int
    """Number of seeds of `best`."""
    tied: tuple[str, ...]

    def __str__(self) -> str:
        shown = join_first(self.tied, NUM_SHOWN, "; ", "; and ")
        others = f"tied with it (95 %, paired): {shown}" if self.tied else "all others are worse"
        return f"best mean over {self.seeds} seeds: {self.best}, {self.mean:.6g}; {others}"


def print_ties(runs: Iterable[tuple[Mapping[str, Any], float]], metric: str) -> None:
    """Print the ties of runs, each with its varied keys and its metric, if there are any."""
    ties = find_ties(runs, larger_is_better=is_larger_better(metric))
    if ties is not None:
        print(printable(str(ties)))


def find_ties(
    runs: Iterable[tuple[Mapping[str, Any], float]], *, larger_is_better: bool
) -> Ties | None:
    """Return the ties of runs, each with its varied keys and its metric.

    Settings are the values of the keys besides `seed`. Returns None unless two settings have
    `MIN_PAIRS` seeds each. Of several runs with the same settings and seed, the last is used.
    """
    values: dict[str, dict[Any, float]] = {}
    for keys, value in runs:
        settings = ", ".join(f"{key}={keys[key]}" for key in keys if key != SEED)
        values.setdefault(settings, {})[keys.get(SEED)] = value
    repeated = {
        settings: by_seed for settings, by_seed in values.items() if len(by_seed) >= MIN_PAIRS
    }
    if len(repeated) < 2:
        return None
    means = {name: float(np.mean(list(by_seed.values()))) for name, by_seed in repeated.items()}
    choose = max if larger_is_better else min
    best = choose(means, key=lambda name: means[name])
    first = repeated[best]

    def is_tied(by_seed: Mapping[Any, float]) -> bool:
        differences = [first[seed] - by_seed[seed] for seed in first if seed in by_seed]
        return count_pairs_to_decide(np.array(differences)) is None

    tied = [name for name, by_seed in repeated.items() if name != best and is_tied(by_seed)]
    return Ties(best, means[best], len(first), tuple(tied))
