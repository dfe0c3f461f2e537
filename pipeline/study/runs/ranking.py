"""The figure that runs are ranked by, and settings that are as good as the best.

A larger or a smaller value is better. Settings of repeated runs are compared by the paired test
over equal seeds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from pipeline.core.errors import printable
from pipeline.core.files.value_text import join_first
from pipeline.core.registry import list_components
from pipeline.study.paired_test import MIN_PAIRS, count_pairs_to_decide
from pipeline.training.component_specs import Direction, list_metric_directions

TRAIN_LOSS = "train_loss"
_TIMES = frozenset({"step_ms", "median_step_ms", "train_s"})
SMALLER_IS_BETTER = _TIMES | {TRAIN_LOSS, "parameters", "epsilon"}
_NOT_METRICS = _TIMES | {
    "train_samples",
    "eval_samples",
    "parameters",
    "steps",
    "count",
    "epsilon",
}
"""Figures that runs aren't ranked by unless one is named."""
_PREFERRED = ("accuracy", "rmse", "mean_iou", "loss", "train_loss")
"""Of metrics that equally many runs have, the first of these is the main one."""
SEED = "seed"
NUM_SHOWN = 5


def directions() -> Mapping[str, Direction]:
    """Return the metrics that a study can optimize, and whether larger or smaller is better."""
    return {**list_metric_directions(list_components("metric")), TRAIN_LOSS: "min"}


def main_metric(runs: Sequence[Mapping[str, float]]) -> str | None:
    """Return the metric to rank runs by; None without metrics. `runs` has the figures of each run.

    A metric of evaluations comes before a loss, and an evaluation loss before a training loss, even
    if few runs have it. Of several such metrics, the one that most runs have is returned.
    """
    names = [name for figures in runs for name in figures if name not in _NOT_METRICS]
    if not names:
        return None
    order = {name: number for number, name in enumerate(_PREFERRED)}

    def rank(name: str) -> tuple[bool, bool, int, int]:
        """Return the criteria by which metrics are compared, the most important first."""
        is_evaluated = not name.startswith("train_")
        num_runs = names.count(name)
        return is_evaluated and name != "loss", is_evaluated, num_runs, -order.get(name, len(order))

    return max(dict.fromkeys(names), key=rank)


def is_larger_better(figure: str) -> bool:
    """Return whether a larger figure is better, for figures of training and of evaluation."""
    if figure in SMALLER_IS_BETTER:
        return False
    metrics = list_metric_directions(list_components("metric"))
    return metrics.get(figure, metrics.get(figure.removeprefix("train_"), "max")) == "max"


def print_ties(runs: Iterable[tuple[Mapping[str, Any], float]], metric: str) -> None:
    """Print the settings with the best mean, and those that the test can't distinguish from them.

    Each of `runs` has its varied keys and its metric. Settings are the values of the keys besides
    `seed`. Nothing is printed unless two settings have `MIN_PAIRS` seeds each. Those that share
    fewer seeds with the best one aren't compared, which is said. Of several runs with the same
    settings and seed, the last is used.
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

    pairs = {
        name: np.array([first[seed] - by_seed[seed] for seed in first if seed in by_seed])
        for name, by_seed in repeated.items()
    }
    compared = [name for name in pairs if len(pairs[name]) >= MIN_PAIRS]
    tied = [name for name in compared if count_pairs_to_decide(pairs[name]) is None]
    others = "no other has its seeds"
    if compared:
        others = "all others are worse"
    if tied:
        others = f"tied with it (95 %, paired): {join_first(tied, NUM_SHOWN, '; ', '; and ')}"
    text = f"best mean over {len(first)} seeds: {best}, {means[best]:.6g}; {others}"
    if compared and len(compared) < len(pairs):
        unpaired = [name for name in pairs if name not in compared]
        listed = join_first(unpaired, NUM_SHOWN, "; ", "; and ")
        text += f"; not compared, for fewer than {MIN_PAIRS} equal seeds: {listed}"
    print(printable(text))
