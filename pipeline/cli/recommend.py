"""`python -m pipeline recommend FOLDER +recipe=NAME KEY=RANGE ...`: what to try next (I-03)."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.compose import compose_and_check
from pipeline.core.errors import RunError, UsageError, printable
from pipeline.core.files.error_text import no_such

USAGE = "recommend takes FOLDER, KEY=VALUE, ranges or lists, --metric, --count, --sampler, --seed"
HELP = """usage: python -m pipeline recommend FOLDER +recipe=NAME KEY=RANGE ... [--metric=NAME]
                                   [--count=N] [--sampler=tpe|gp|random] [--seed=N]

Read the results of earlier runs and say which values to try next, as commands to copy, and the
command of a study that begins with what these runs have shown.

  FOLDER          earlier runs; those of the same recipe, but for the searched keys, count
  KEY=RANGE       a searched key: 'tag(log,interval(0.001,0.1))', 'interval(8,64)', 16,32,64
  --metric=NAME   accuracy unless it is given; train_loss, or any metric of the evaluation
  --count=N       the number of runs to propose, 3 unless it is given
  --sampler=NAME  tpe: tree-structured Parzen estimator; gp: Gaussian process with expected
                  improvement, which needs torch; random
  --seed=N        of the sampler, 0 unless it is given

example: python -m pipeline recommend outputs +recipe=lenet5_digits \\
             'train.optimizer.lr=tag(log,interval(0.001,0.5))' train.batch_size=16,32,64
"""
SAMPLERS = ("tpe", "gp", "random")
MAX_COUNT = 1000


@dataclass(frozen=True)
class RecommendArguments:
    """The parsed arguments."""

    folder: Path
    overrides: tuple[str, ...]
    metric: str
    count: int
    sampler: str
    seed: int


def main(args: Sequence[str]) -> int:
    """Print what to try next; the exit status is 0.

    Raises UsageError for other arguments, RecipeError for a wrong recipe or range, DataError where
    the folder can't be read, RunError where Optuna, or torch for `gp`, is not installed.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    given = _parse(args)
    _require("optuna", "pip install 'recipe-pipeline[sweep]'")
    if given.sampler == "gp":
        _require("torch", "--sampler=gp is computed by it: pip install torch, or --sampler=tpe")
    for line in _recommendation(given):
        print(printable(line))
    return 0


def _require(module: str, what_to_do: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise RunError(f"{module} is not installed; {what_to_do}")


def _recommendation(given: RecommendArguments) -> list[str]:
    import optuna

    from pipeline.study.sweep.history import sampler_named, suggest, trials_of_runs
    from pipeline.study.sweep.space import one_at_a_time, read_space, to_overrides
    from pipeline.study.sweep.study import directions

    known = directions()
    if given.metric not in known:
        raise UsageError([f"--metric={given.metric}"], no_such("metric", given.metric, known))
    space, fixed = read_space(given.overrides)
    recipes = [compose_and_check([*fixed, *to_overrides(each)]) for each in one_at_a_time(space)]
    trials, runs = trials_of_runs(given.folder, recipes[0], space, given.metric)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = sampler_named(given.sampler, given.seed)
    maximizes = known[given.metric] == "max"
    proposed = suggest(trials, space, given.count, sampler=sampler, maximizes=maximizes)
    lines = [f"{len(trials)} of {runs} runs in {given.folder} are of this recipe and search space"]
    if trials:
        rank = max if maximizes else min
        best = rank(trials, key=lambda trial: trial.values[0])
        values = " ".join(to_overrides(best.params))
        lines.append(f"best so far: {given.metric} {best.values[0]:.6g} with {values}")
    lines += [_command([*fixed, *to_overrides(values)]) for values in proposed]
    study = [
        "-m",
        *given.overrides,
        "hydra/sweeper=optuna",
        f"hydra.sweeper.metric={given.metric}",
        f"hydra.sweeper.history={given.folder}",
        f"hydra.sweeper.n_trials={given.count}",
    ]
    return [*lines, "these and the next by themselves:", _command(study)]


def _command(arguments: Sequence[str]) -> str:
    return f"python -m pipeline {shlex.join(arguments)}"


def _parse(args: Sequence[str]) -> RecommendArguments:
    options = {"--metric": "accuracy", "--count": "3", "--sampler": "tpe", "--seed": "0"}
    wrong, folders, overrides = [], [], []
    for arg in args:
        name, equals, value = arg.partition("=")
        if name in options and value:
            options[name] = value
        elif arg.startswith("-"):
            wrong.append(arg)
        elif equals or arg.startswith(("+", "~")):
            overrides.append(arg)
        else:
            folders.append(arg)
    if wrong or len(folders) != 1:
        raise UsageError(wrong or folders[1:] or args, USAGE)
    count, seed, sampler = options["--count"], options["--seed"], options["--sampler"]
    if not (count.isdecimal() and len(count) < 5 and 1 <= int(count) <= MAX_COUNT):
        raise UsageError([f"--count={count}"], f"must be a whole number from 1 to {MAX_COUNT}")
    if not (seed.isdecimal() and len(seed) <= 9):
        raise UsageError([f"--seed={seed}"], "must be a whole number below 10^9")
    if sampler not in SAMPLERS:
        raise UsageError([f"--sampler={sampler}"], f"must be one of {', '.join(SAMPLERS)}")
    return RecommendArguments(
        Path(folders[0]), tuple(overrides), options["--metric"], int(count), sampler, int(seed)
    )
