"""`python -m pipeline recommend FOLDER +recipe=NAME KEY=RANGE ...`: what to try next."""

from __future__ import annotations

import importlib.util
import shlex
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.core.errors import RunError, UsageError, printable
from pipeline.core.files.error_text import no_such
from pipeline.study.runs.ranking import directions
from pipeline.study.sweep.history import sampler_named, suggest, trials_of_runs
from pipeline.study.sweep.space import one_at_a_time, read_space, to_overrides


@dataclass(frozen=True)
class RecommendArguments:
    """The parsed arguments."""

    folder: Path
    overrides: tuple[str, ...]
    metric: str
    count: int
    sampler: str
    seed: int


@dataclass(frozen=True)
class NextRuns:
    """Sentences about earlier runs, the commands of the next ones, and of a study that goes on."""

    summary: tuple[str, ...]
    commands: tuple[str, ...]
    study: str

    def lines(self) -> list[str]:
        """Return the lines to print."""
        return [*self.summary, *self.commands, "these and the next by themselves:", self.study]


def main(
    folder: Path, overrides: Sequence[str], metric: str, count: int, sampler: str, seed: int
) -> CommandResult:
    """Print what to try next.

    Raises UsageError for an unknown metric, RecipeError for a wrong recipe or range, DataError if
    the folder can't be read, RunError if Optuna, or torch for `gp`, isn't installed.
    """
    _require("optuna", "pip install 'recipe-pipeline[sweep]'")
    if sampler == "gp":
        _require("torch", "--sampler gp is computed by it: pip install torch, or --sampler tpe")
    arguments = RecommendArguments(folder, tuple(overrides), metric, count, sampler, seed)
    recommendation = _recommend(arguments)
    for line in recommendation.lines():
        print(printable(line))
    return CommandResult(asdict(recommendation))


def _require(module: str, what_to_do: str) -> None:
    if importlib.util.find_spec(module) is None:
        raise RunError(f"{module} is not installed; {what_to_do}")


def _recommend(given: RecommendArguments) -> NextRuns:
    import optuna

    known = directions()
    if given.metric not in known:
        raise UsageError([f"--metric {given.metric}"], no_such("metric", given.metric, known))
    space, fixed = read_space(given.overrides)
    recipes = [compose_and_check([*fixed, *to_overrides(each)]) for each in one_at_a_time(space)]
    trials, runs = trials_of_runs(given.folder, recipes[0], space, given.metric)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    sampler = sampler_named(given.sampler, given.seed)
    maximizes = known[given.metric] == "max"
    proposed = suggest(trials, space, given.count, sampler=sampler, maximizes=maximizes)
    summary = [
        f"{len(trials)} of {runs} runs in {given.folder} are of this recipe and search space"
    ]
    if trials:
        rank = max if maximizes else min
        best = rank(trials, key=lambda trial: trial.values[0])
        values = " ".join(to_overrides(best.params))
        summary.append(f"best so far: {given.metric} {best.values[0]:.6g} with {values}")
    study = [
        "-m",
        *given.overrides,
        "hydra/sweeper=optuna",
        f"hydra.sweeper.metric={given.metric}",
        f"hydra.sweeper.history={given.folder}",
        f"hydra.sweeper.n_trials={given.count}",
    ]
    commands = tuple(_command([*fixed, *to_overrides(values)]) for values in proposed)
    return NextRuns(tuple(summary), commands, _command(study))


def _command(arguments: Sequence[str]) -> str:
    return f"python -m pipeline {shlex.join(arguments)}"
