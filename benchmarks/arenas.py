"""Proofs of `python -m pipeline arena`: equal sides, planted handicaps, repetition.

    python -m benchmarks.arenas --save
    python -m benchmarks.arenas --parts tuned --pairs 16 --comparisons 100 --save FILE

Equal sides: the standings of two values that are one recipe, an MLP of 64-8-10 on the shipped
digits for two epochs, whose pairs have two different seeds, so every verdict is false. Tuned: the
same recipe twice, each side with its trials, whose rates of one side are shifted, and with equal
seeds of the pairs, as in an arena. Its verdicts are about the chosen rates, which differ: they are
right about these, but say nothing about the two values, which are one. Handicaps: a learning rate
three times lower or higher than the tuned one, over the seeds of the pairs.
Repetition: the command, twice into two folders; everything but times must have the same bytes.
"""

from __future__ import annotations

import argparse
import math
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
from pipeline.study.arena.contest import (
    DECADES_EACH_SIDE,
    FOLD,
    RATE,
    SHIPPED,
    SearchRange,
    draw_places,
)
from pipeline.study.arena.contest_runs import ArenaRun, Entry, Heat, choose_trial
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
    finals = {number: make_trial(figure) for number, figure in enumerate(figures)}
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


def list_factors(trials: int, shift: float) -> list[float]:
    """Return the multiples of the recipe's rate of an arena's trials, moved by `shift` decades."""
    space = SearchRange(RATE, 10 ** (shift - DECADES_EACH_SIDE), 10 ** (shift + DECADES_EACH_SIDE))
    return [space.choose(float(place)) for place in draw_places(0, trials, 1)[:, 0]]


def count_tuned_sides(
    comparisons: int, pairs: int, trials: int, shift: float
) -> list[tuple[str, Counter[Verdict], int, list[float]]]:
    """Return verdicts on A against A with trials of its own, by metric: how often each is given,
    how often both choose the same trial, and the absolute differences of those with a verdict."""
    folded = prepare_runs("lenet5_digits", [*TINY, *FOLD])
    runs = prepare_runs("lenet5_digits", TINY)
    sides = (list_factors(trials, 0.0), list_factors(trials, shift))
    tuning_seeds = range(TUNING_SEEDS.start, TUNING_SEEDS.start + comparisons)
    rows = []
    for metric in ("accuracy", "loss"):
        chosen: list[list[int]] = []
        for factors in sides:
            figures = [measure_figures(folded, each, tuning_seeds, metric) for each in factors]
            tries = [
                [make_trial(figure) for figure in column] for column in zip(*figures, strict=True)
            ]
            chosen.append([choose_trial(column, metric) or 0 for column in tries])
        verdicts: Counter[Verdict] = Counter()
        differences = []
        for number in range(comparisons):
            seeds = range(1 + number * pairs, 1 + (number + 1) * pairs)
            base, other = (
                measure_figures(runs, factors[picks[number]], seeds, metric)
                for factors, picks in zip(sides, chosen, strict=True)
            )
            verdict = judge(base, other, metric)
            verdicts[verdict] += 1
            if verdict in ("better", "worse"):
                differences.append(abs(sum(other) - sum(base)) / pairs)
        same = sum(one == two for one, two in zip(*chosen, strict=True))
        rows.append((metric, verdicts, same, differences))
    return rows


def make_trial(figure: float) -> ArenaRun:
    """Return a run with one evaluation."""
    return ArenaRun((1,), (figure,), None, has_diverged=not math.isfinite(figure))


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


def format_tuned_sides(comparisons: int, pairs: int, trials: int, shift: float) -> str:
    """Return the table of verdicts on one recipe that is tuned twice."""
    rows = []
    for metric, verdicts, same, differences in count_tuned_sides(comparisons, pairs, trials, shift):
        decided = verdicts["better"] + verdicts["worse"]
        middle = f"{np.median(differences):.2g}" if differences else ""
        row = [metric, f"{comparisons}", f"{same}", f"{decided}", f"{decided / comparisons:.1%}"]
        rows.append([*row, middle])
    head = [
        "metric",
        "comparisons",
        "the same trial number",
        "verdicts",
        "share",
        "median difference",
    ]
    about = (
        f"A against A, each tuned by {trials} trials on a fold with one seed, rates of one side "
        f"{shift:g} decades higher (`--trials {trials} --shift {shift:g}`), {pairs} pairs of equal "
        "seeds:"
    )
    return f"{about}\n\n{table(head, rows)}"


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
    parser.add_argument(
        "--parts",
        default="equal,handicaps,repeat",
        help="some of equal, tuned, handicaps, repeat (default: %(default)s)",
    )
    parser.add_argument("--trials", type=int, default=6, help="of each side, in tuned")
    parser.add_argument("--shift", type=float, default=0.25, help="decades, in tuned")
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
        "tuned": partial(format_tuned_sides, args.comparisons, args.pairs, args.trials, args.shift),
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
