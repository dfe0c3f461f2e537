"""The number of trials that `recommend` needs on a real task, against random search.

    python -m benchmarks.recommend --save

A trial trains an MLP of 64-16-10 on the shipped digits for five epochs; its score is the loss on
the 359 evaluation samples. Learning rate, momentum and batch size are searched. One run at a time
is proposed from the results of all before it, as by repeated
`python -m pipeline recommend --count=1`, with the same samplers. The goal is the loss that one in a
hundred random trials of other seeds reaches. Each pair of momentum and batch size has a compiled
program; a learning rate is an argument.
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
from pipeline.data.inputs import Dataset
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
FIXED = ["model=mlp", "model.hidden=[16]", "schedule=constant", "train.epochs=5"]
CALIBRATION_TRIALS = 600
SHARE = 0.01
MOST_TRIALS = 300
SEEDS = 10
Params = Mapping[str, Any]


@dataclass(frozen=True)
class Program:
    """The compiled program of a momentum and a batch size, for all learning rates."""

    recipe: Recipe
    dataset: Dataset
    executable: Executable
    steps: int


@cache
def _compile_program(momentum: str, batch_size: str) -> Program:
    keys = [f"train.optimizer.momentum={momentum}", f"train.batch_size={batch_size}"]
    recipe = load_recipe("lenet5_digits", [*FIXED, *keys])
    reporter = Reporter(console=Console(file=io.StringIO()))
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    backend = recipe.device.open(recipe.parallel)
    lowered = lower(recipe, dataset, built, backend, None, reporter)
    executable = compile_programs(recipe, dataset, lowered, backend, reporter)
    return Program(recipe, dataset, executable, built.run_schedule.total)


def compute_loss(params: Params) -> float:
    """Return the evaluation loss of a trial; 100 if it diverges."""
    program = _compile_program(params["train.optimizer.momentum"], params["train.batch_size"])
    executable = program.executable
    rates = np.full(program.steps, params["train.optimizer.lr"], np.float32)
    executable.set_learning_rates(rates)
    state, telemetry = executable.run(executable.init(), 0, program.steps, "loop")
    if telemetry.non_finite_step is not None:
        return 100.0
    options = EvalOptions(program.recipe.train.dispatch_seconds)
    evaluation = evaluate(executable, state, program.dataset, options)
    assert evaluation is not None, "an evaluation without a stop isn't cancelled"
    loss = float(evaluation.metrics["loss"])
    return min(loss, 100.0) if math.isfinite(loss) else 100.0


def find_goal() -> float:
    """Return the loss that `SHARE` of random trials reach."""
    draws = suggest_values(
        [], SPACE, CALIBRATION_TRIALS, sampler=make_sampler("random", 10**6), maximizes=False
    )
    return float(np.quantile([compute_loss(params) for params in draws], SHARE))


def count_trials(sampler: str, seed: int, goal: float) -> int:
    """Count the trials until one reaches the goal, each proposed from all before it."""
    trials: list[optuna.trial.FrozenTrial] = []
    for number in range(1, MOST_TRIALS + 1):
        # Each command makes a new sampler: with the same seed, all suggestions would be alike.
        fresh = make_sampler(sampler, 1000 * seed + number)
        (params,) = suggest_values(trials, SPACE, 1, sampler=fresh, maximizes=False)
        loss = compute_loss(params)
        if loss <= goal:
            return number
        trials.append(
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
    goal = find_goal()
    seeds = range(args.first, args.first + args.seeds)
    counts = {
        name: [count_trials(name, seed, goal) for seed in seeds] for name in ("tpe", "random")
    }
    command = f"python -m benchmarks.recommend --seeds {args.seeds} --first {args.first}"
    publish(report(counts, goal, command), args.save)


def report(counts: Mapping[str, list[int]], goal: float, command: str) -> str:
    """Return the result in Markdown."""
    random_median = statistics.median(counts["random"])
    rows = [
        [
            name,
            f"{statistics.median(column):g}",
            f"{min(column)} to {max(column)}",
            f"{statistics.median(column) / random_median:.2f}",
        ]
        for name, column in counts.items()
    ]
    head = heading("Recommend", command, PACKAGES)
    line = f"Trials until an evaluation loss of {goal:.4f}."
    return "\n".join([head, line, "", table(["sampler", "median", "range", "of random"], rows)])


if __name__ == "__main__":
    main()
