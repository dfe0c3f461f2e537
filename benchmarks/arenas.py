"""Proofs of `python -m pipeline arena`: equal sides, planted handicaps, repetition.

    python -m benchmarks.arenas --save

Equal sides: the standings of two values that are one recipe, an MLP of 64-8-10 on the shipped
digits for two epochs, whose pairs have two different seeds, so every verdict is false. Handicaps:
a learning rate three times lower or higher than the tuned one, over the seeds of the pairs.
Repetition: the command, twice into two folders; everything but times must have the same bytes.
"""

from __future__ import annotations

import argparse
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Mapping, Sequence
from functools import partial
from pathlib import Path

import numpy as np

from benchmarks.better import TINY, SeededRuns, prepare_runs
from benchmarks.measure import add_save, heading, publish, table
from pipeline.study.arena.arena_page import RESULTS
from pipeline.study.arena.contest import SHIPPED
from pipeline.study.arena.contest_runs import ArenaRun, Entry, Heat
from pipeline.study.arena.standings import Verdict, judge_heat

PACKAGES = ("jax", "jaxlib")
FACTORS = (0.01, 0.03, 0.1, 0.3, 1.0, 3.0, 10.0, 30.0, 100.0)
"""Multiples of the recipe's rate, among which the tuned one is chosen, by the mean of four seeds
that no pair has."""
TUNING_SEEDS = range(1_000_001, 1_000_005)
HANDICAPS = (1 / 3, 3.0)
RECIPES: Sequence[tuple[str, Sequence[str], str]] = (
    ("lenet5_digits", TINY, "accuracy"),
    ("breast_cancer_mlp", ["train.epochs=3"], "loss"),
    ("diabetes_mlp", ["train.epochs=3"], "loss"),
)
"""Recipe, overrides, metric."""
REPEATED = ["--optimizers", "adamw,momentum", "--workloads", "table"]


def make_entry(value: str, figures: Sequence[float]) -> Entry:
    """Return the runs of a value with one evaluation each; the pair's number is the seed."""
    finals = {
        number: ArenaRun((1,), (figure,), None, has_diverged=False)
        for number, figure in enumerate(figures)
    }
    return Entry(value, ({},), (), 0, finals)


def judge(base: Sequence[float], other: Sequence[float], metric: str) -> Verdict:
    """Return the arena's verdict on values, one a pair."""
    heat = Heat(SHIPPED[0], metric, (make_entry("A", base), make_entry("B", other)))
    return judge_heat(heat, "A").standings[1].verdict


def count_equal_sides(comparisons: int, pairs: int) -> dict[str, Counter[Verdict]]:
    """Return how often each verdict is given on A against A, by metric."""
    runs = prepare_runs("lenet5_digits", TINY)
    measured = [runs.measure(seed) for seed in range(1, 2 * comparisons * pairs + 1)]
    counts: dict[str, Counter[Verdict]] = {}
    for metric in ("accuracy", "loss"):
        figures = [values[metric] for values in measured]
        counts[metric] = Counter(
            judge(
                figures[begin : begin + pairs], figures[begin + pairs : begin + 2 * pairs], metric
            )
            for begin in range(0, len(figures), 2 * pairs)
        )
    return counts


def measure_figures(
    runs: SeededRuns, factor: float, seeds: Iterable[int], metric: str
) -> list[float]:
    """Return the metric of seeds with the recipe's learning rates, multiplied by a factor."""
    rates = runs.executable.work.learning_rates
    runs.executable.set_learning_rates((rates * factor).astype(np.float32))
    return [runs.measure(seed)[metric] for seed in seeds]


def tune_factor(runs: SeededRuns, metric: str) -> float:
    """Return the factor with the best mean over `TUNING_SEEDS`."""
    sign = 1 if metric == "accuracy" else -1
    return max(
        FACTORS, key=lambda factor: sign * sum(measure_figures(runs, factor, TUNING_SEEDS, metric))
    )


def find_handicaps(comparisons: int, pairs: int) -> list[list[str]]:
    """Return the rows of the table of planted handicaps."""
    rows = []
    seeds = range(1, comparisons * pairs + 1)
    for name, keys, metric in RECIPES:
        runs = prepare_runs(name, keys)
        tuned = tune_factor(runs, metric)
        figures = measure_figures(runs, tuned, seeds, metric)
        for handicap in HANDICAPS:
            handicapped = measure_figures(runs, tuned * handicap, seeds, metric)
            verdicts = Counter(
                judge(figures[begin : begin + pairs], handicapped[begin : begin + pairs], metric)
                for begin in range(0, len(figures), pairs)
            )
            rows.append(
                [
                    name,
                    metric,
                    f"{tuned:g}",
                    f"{tuned * handicap:.2g}",
                    f"{sum(figures) / len(figures):.4g}",
                    f"{sum(handicapped) / len(handicapped):.4g}",
                    *(f"{verdicts[word]}" for word in ("worse", "tied", "better")),
                ]
            )
    return rows


def repeat_table(trials: int, seeds: int) -> tuple[bool, int]:
    """Return whether two arenas wrote the same bytes, and how many."""
    contents = []
    with tempfile.TemporaryDirectory() as folder:
        for name in ("one", "two"):
            words = [*REPEATED, "--trials", str(trials), "--seeds", str(seeds), "--out", name]
            command = [sys.executable, "-m", "pipeline", "arena", *words]
            subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
            contents.append(Path(folder, name, RESULTS).read_bytes())
    return contents[0] == contents[1], len(contents[0])


def format_equal_sides(comparisons: int, pairs: int) -> str:
    """Return the table of false verdicts."""
    rows = []
    for metric, verdicts in count_equal_sides(comparisons, pairs).items():
        wrong = verdicts["better"] + verdicts["worse"]
        total = sum(verdicts.values())
        rows.append([metric, f"{total}", f"{wrong}", f"{wrong / total:.1%}"])
    body = table(["metric", "comparisons", "false verdicts", "share"], rows)
    return f"A against A with other seeds, {pairs} pairs:\n\n{body}"


def format_handicaps(comparisons: int, pairs: int) -> str:
    """Return the table of planted handicaps."""
    head = ["recipe", "metric", "tuned factor", "planted factor", "mean", "mean, planted"]
    body = table([*head, "worse", "tied", "better"], find_handicaps(comparisons, pairs))
    about = (
        "A rate three times lower or higher than the tuned one, in multiples of the recipe's, "
        f"{comparisons} comparisons of {pairs} pairs:"
    )
    return f"{about}\n\n{body}"


def format_repetition(trials: int, seeds: int) -> str:
    """Return whether two arenas wrote the same bytes."""
    is_repeated, size = repeat_table(trials, seeds)
    words = f"Two arenas of {' '.join(REPEATED)} --trials {trials} --seeds {seeds}"
    return (
        f"{words}: {size:,} bytes of {RESULTS}, {'the same' if is_repeated else 'NOT the same'}.\n"
    )


def main() -> None:
    """Measure and print Markdown tables, each as soon as it is measured."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--comparisons", type=int, default=400, help="of A with A")
    parser.add_argument("--handicaps", type=int, default=20, help="comparisons of each handicap")
    parser.add_argument("--pairs", type=int, default=8)
    parser.add_argument("--parts", default="equal,handicaps,repeat", help="default: %(default)s")
    add_save(parser, "arenas.md")
    args = parser.parse_args()
    options = f"--comparisons {args.comparisons} --handicaps {args.handicaps} --pairs {args.pairs}"
    if args.parts != parser.get_default("parts"):
        options += f" --parts {args.parts}"
    title = heading(
        "Verdicts of `arena`", f"python -m benchmarks.arenas {options} --save", PACKAGES
    )
    measures: Mapping[str, Callable[[], str]] = {
        "equal": partial(format_equal_sides, args.comparisons, args.pairs),
        "handicaps": partial(format_handicaps, args.handicaps, args.pairs),
        "repeat": partial(format_repetition, 3, 6),
    }
    parts = [title]
    for name in args.parts.split(","):
        parts.append(measures[name]())
        print(parts[-1], flush=True)
    publish("\n".join(parts), args.save)


if __name__ == "__main__":
    main()
