"""`python -m pipeline folds +recipe=NAME ...`: cross-validation, each fold evaluated once."""

from __future__ import annotations

from collections.abc import Sequence

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.train import TrainArguments, run_sweep
from pipeline.config.compose import compose_and_check
from pipeline.config.hydra_options import resolve_recipe
from pipeline.config.overrides import get_key, list_swept_keys, require_hydra_keys
from pipeline.core.errors import RecipeError, printable
from pipeline.inspect.report.report_files import (
    OUT_OF_FOLD,
    FoldMetric,
    read_fold_metrics,
    write_folds,
)
from pipeline.stages.data import read_selected
from pipeline.study.population.groups import FOLD, list_member_problems
from pipeline.study.sweep.vectorized import KEY as VECTORIZE

SECTION = "dataset.folds"
SWEEPER = "hydra/sweeper"
STAGES = ("train", "checkpoint", "eval")
"""Stages without which a fold has no metrics or no predictions."""


def main(overrides: Sequence[str], k: int, seed: int) -> CommandResult:
    """Train and evaluate a recipe on each of `k` folds, as jobs of a sweep, and print the metrics.

    The exit status is the sweep's. Raises RecipeError with every problem of the recipe, and for
    more folds than samples of a class; DataError if the data can't be read.
    """
    swept = list_swept_keys(overrides)
    problems = [f"{key}: has several values; folds train one recipe" for key in swept]
    keys = {get_key(override) for override in overrides}
    problems += [
        f"{key}: is set by --k and --seed" for key in sorted(keys) if key.startswith(SECTION)
    ]
    if SWEEPER in keys:
        problems.append(f"{SWEEPER}: must be left out; folds are a grid")
    if problems:
        raise RecipeError(problems)
    require_hydra_keys(overrides)
    shared = [*overrides, f"{SECTION}.count={k}", f"{SECTION}.seed={seed}"]
    sweep_keys = ("hydra", "train.resume")
    recipe_keys = [item for item in shared if not get_key(item).startswith(sweep_keys)]
    recipe = compose_and_check([f"{FOLD}=0", *recipe_keys])
    if not set(STAGES) <= set(recipe.stages):
        raise RecipeError(["stages: must have train, checkpoint and eval for folds"])
    read_selected(recipe)  # raises if the data can't be split into the folds
    typed = [*shared, f"{FOLD}=range(0,{k})"]
    if keys.isdisjoint((VECTORIZE, "hydra/launcher")) and not list_member_problems([recipe]):
        # The folds share a program.
        typed.append(f"{VECTORIZE}=true")
    words = ["folds", "--k", str(k), "--seed", str(seed), *overrides]
    sweep_dir, status = run_sweep(TrainArguments(words, ["-m"], typed, resolve_recipe(typed)))
    facts = {"sweep": str(sweep_dir), "folds": k, "status": status}
    if status:
        return CommandResult(facts, status)
    metrics = read_fold_metrics(sweep_dir)
    num_predictions = write_folds(sweep_dir, metrics)
    _print_metrics(metrics, k)
    file = sweep_dir / OUT_OF_FOLD
    about = f"{num_predictions:,} predictions, each by the run that didn't train on it"
    print(printable(f"{file}: {about}"))
    figures = {
        metric.name: {"mean": metric.mean, "std": metric.std, "values": metric.values}
        for metric in metrics
    }
    return CommandResult({**facts, "metrics": figures, "predictions": str(file)})


def _print_metrics(metrics: Sequence[FoldMetric], k: int) -> None:
    table = Table(title=f"{k} folds", box=SIMPLE_HEAD, padding=0)
    for name in ("metric", "mean", "std", "least", "greatest"):
        table.add_column(name, justify="left" if name == "metric" else "right")
    for metric in metrics:
        numbers = [metric.mean, metric.std, min(metric.values), max(metric.values)]
        table.add_row(metric.name, *(f"{number:.4g}" for number in numbers))
    Console(markup=False).print(table)
