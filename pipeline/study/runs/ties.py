"""Settings of repeated runs that are as good as the best, by the paired test over equal seeds."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import numpy as np

from pipeline.core.errors import printable
from pipeline.core.files.value_text import join_first
from pipeline.study.paired_test import MIN_PAIRS, count_pairs_to_decide
from pipeline.study.runs.ranking import is_larger_better

SEED = "seed"
NUM_SHOWN = 5


def print_ties(runs: Iterable[tuple[Mapping[str, Any], float]], metric: str) -> None:
    """Print the settings with the best mean, and those that the test can't distinguish from them.

    Each of `runs` has its varied keys and its metric. Settings are the values of the keys besides
    `seed`. Nothing is printed unless two settings have `MIN_PAIRS` seeds each. Of several runs with
    the same settings and seed, the last is used.
    """
    values: dict[str, dict[Any, float]] = {}
    for keys, value in runs:
        settings = ", ".join(f"{key}={keys[key]}" for key in keys if key != SEED)
        values.setdefault(settings, {})[keys.get(SEED)] = value
    repeated = {
        settings: by_seed for settings, by_seed in values.items() if len(by_seed) >= MIN_PAIRS
    }
    if len(repeated) < 2:
        return
    means = {name: float(np.mean(list(by_seed.values()))) for name, by_seed in repeated.items()}
    choose = max if is_larger_better(metric) else min
    best = choose(means, key=lambda name: means[name])
    first = repeated.pop(best)

    def is_tied(by_seed: Mapping[Any, float]) -> bool:
        differences = [first[seed] - by_seed[seed] for seed in first if seed in by_seed]
        return count_pairs_to_decide(np.array(differences)) is None

    tied = [name for name, by_seed in repeated.items() if is_tied(by_seed)]
    others = "all others are worse"
    if tied:
        others = f"tied with it (95 %, paired): {join_first(tied, NUM_SHOWN, '; ', '; and ')}"
    text = f"best mean over {len(first)} seeds: {best}, {means[best]:.6g}; {others}"
    print(printable(text))
