"""`python -m pipeline recommend FOLDER +recipe=NAME KEY=RANGE ...`: what to try next."""

from __future__ import annotations

import importlib.util
import re
import shlex
from collections.abc import Sequence
from pathlib import Path

from pipeline.cli.commands.command import PROGRAM, CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.config.overrides import quote_value
from pipeline.core.errors import RunError, UsageError, printable
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.study.runs.ranking import directions
from pipeline.study.sweep.space import read_space, to_overrides, vary_one_at_a_time


def main(
    folder: Path, overrides: Sequence[str], metric: str, count: int, sampler: str, seed: int
) -> CommandResult:
    """Print the values to try next, as commands.

    Raises UsageError for an unknown metric, RecipeError for a wrong recipe or range, DataError if
    the folder can't be read, RunError if Optuna isn't installed.
    """
    if importlib.util.find_spec("optuna") is None:
        raise RunError("optuna isn't installed; pip install 'recipe-pipeline[sweep]'")
    import optuna

    from pipeline.study.sweep.history import make_sampler, read_trials, suggest_values

    metrics = directions()
    if metric not in metrics:
        raise UsageError([f"--metric {metric}"], explain_unknown_name("metric", metric, metrics))
    space, fixed = read_space(overrides)
    recipes = [
        compose_and_check([*fixed, *to_overrides(point)]) for point in vary_one_at_a_time(space)
    ]
    trials, num_runs = read_trials(folder, recipes[0], space, metric)
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    maximizes = metrics[metric] == "max"
    proposed = suggest_values(
        trials, space, count, sampler=make_sampler(sampler, seed), maximizes=maximizes
    )
    summary = [f"{len(trials)} of {num_runs} runs in {folder} are of this recipe and search space"]
    if trials:
        select_best = max if maximizes else min
        best = select_best(trials, key=lambda trial: trial.values[0])
        values = " ".join(to_overrides(best.params))
        summary.append(f"best so far: {metric} {best.values[0]:.6g} with {values}")
    is_plain = re.fullmatch(r"[\w/.-]+", str(folder), re.ASCII)
    history = str(folder) if is_plain else quote_value(str(folder))
    study = [
        "-m",
        *overrides,
        "hydra/sweeper=optuna",
        f"hydra.sweeper.metric={metric}",
        f"hydra.sweeper.history={history}",
        f"hydra.sweeper.n_trials={count}",
    ]
    commands = [f"{PROGRAM} {shlex.join([*fixed, *to_overrides(values)])}" for values in proposed]
    study_command = f"{PROGRAM} {shlex.join(study)}"
    for line in [*summary, *commands, "these and further ones as a study:", study_command]:
        print(printable(line))
    return CommandResult({"summary": summary, "commands": commands, "study": study_command})
