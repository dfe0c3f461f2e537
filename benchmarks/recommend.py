"""How many trials `recommend` needs on a real task, against random search.

    python -m benchmarks.recommend --save

A trial trains an MLP of 64-16-10 on the shipped digits for five epochs and is rated by its loss on
the 359 evaluation samples; learning rate, momentum and batch size are searched. One run at a time
is proposed from the results of all before it, as `python -m pipeline recommend --count=1` does
again and again, by the same samplers. The goal is a loss that one in a hundred random trials
reaches, found out by trials of other seeds. Momentum and batch size are compiled into a program,
of which there is one for each pair; a learning rate is an argument.
"""

from __future__ import annotations

import argparse
import io
import math
import statistics
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

import numpy as np
import optuna
from optuna.distributions import BaseDistribution, CategoricalDistribution, FloatDistribution
from rich.console import Console

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe
from pipeline.backends.base import Executable
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.lower import lower
from pipeline.study.sweep.history import make_sampler, suggest_values

PACKAGES = ("jax", "jaxlib", "optuna")
SPACE: Mapping[str, BaseDistribution] = {
    "train.optimizer.lr": FloatDistribution(1e-4, 1.0, log=True),
    "train.optimizer.momentum": CategoricalDistribution(("0.0", "0.5", "0.9", "0.99")),
    "train.batch_size": CategoricalDistribution(("16", "32", "64")),
}
FIXED = ["model=mlp", "model.hidden=[16]", "schedule=constant", "train.passes=5"]
CALIBRATION_TRIALS, SHARE = 600, 0.01
MOST_TRIALS = 300
SEEDS = 10
Params = Mapping[str, Any]


@dataclass(frozen=True)
class Prepared:
    """Programs for all learning rates."""

    recipe: Recipe
    dataset: Dataset
    executable: Executable
    steps: int


@cache
def _prepared(momentum: str, batch_size: str) -> Prepared:
    keys = [f"train.optimizer.momentum={momentum}", f"train.batch_size={batch_size}"]
    recipe = load_recipe("lenet5_digits", [*FIXED, *keys])
    reporter = Reporter(console=Console(file=io.StringIO()))
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    backend = recipe.device.open(recipe.parallel)
    lowered = lower(recipe, dataset, built, backend, None, reporter)
    executable = compile_programs(recipe, dataset, lowered, backend, reporter)
    return Prepared(recipe, dataset, executable, built.run_schedule.total)


def loss_of(params: Params) -> float:
    """The evaluation loss of a trial; a large number where it diverges."""
    task = _prepared(params["train.optimizer.momentum"], params["train.batch_size"])
    run, rates = task.executable, np.full(task.steps, params["train.optimizer.lr"], np.float32)
    run.set_learning_rates(rates)
    state, telemetry = run.run(run.init(), 0, task.steps, "loop")
    if telemetry.non_finite_step is not None:
        return 100.0
    found = evaluate(run, state, task.dataset, EvalOptions(task.recipe.train.dispatch_seconds))
    assert found is not None, "nobody gives it up"
    loss = float(found.metrics["loss"])
    return min(loss, 100.0) if math.isfinite(loss) else 100.0


def goal() -> float:
    """The loss that `SHARE` of random trials reach."""
    draws = suggest_values(
        [], SPACE, CALIBRATION_TRIALS, sampler=make_sampler("random", 10**6), maximizes=False
    )
    return float(np.quantile([loss_of(one) for one in draws], SHARE))


def trials_needed(sampler: str, seed: int, wanted: float) -> int:
    """The number of trials until one has reached the loss, each proposed from all before it."""
    known: list[optuna.trial.FrozenTrial] = []
    for number in range(1, MOST_TRIALS + 1):
        # Each command has a sampler of its own: with the seed of its first, all would be alike.
        own = make_sampler(sampler, 1000 * seed + number)
        (params,) = suggest_values(known, SPACE, 1, sampler=own, maximizes=False)
        loss = loss_of(params)
        if loss <= wanted:
            return number
        known.append(
            optuna.create_trial(params=dict(params), distributions=dict(SPACE), value=loss)
        )
    return MOST_TRIALS


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--seeds", type=int, default=SEEDS)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    add_save(parser, "recommend.md")
    args = parser.parse_args()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    wanted = goal()
    needed = {
        name: [
            trials_needed(name, seed, wanted) for seed in range(args.first, args.first + args.seeds)
        ]
        for name in ("tpe", "random")
    }
    command = f"python -m benchmarks.recommend --seeds {args.seeds} --first {args.first}"
    publish(report(needed, wanted, command), args.save)


def report(needed: Mapping[str, list[int]], wanted: float, command: str) -> str:
    """The result in Markdown."""
    at_random = statistics.median(needed["random"])
    rows = [
        [
            name,
            f"{statistics.median(counts):g}",
            f"{min(counts)} to {max(counts)}",
            f"{statistics.median(counts) / at_random:.2f}",
        ]
        for name, counts in needed.items()
    ]
    head = heading("Recommend", command, PACKAGES)
    about = f"Trials until an evaluation loss of {wanted:.4f}."
    return "\n".join([head, about, "", table(["sampler", "median", "range", "of random"], rows)])


if __name__ == "__main__":
    main()
