"""`python -m pipeline job --to ENGINE ...`: a file by which a scheduler runs a recipe.

Its limits come from this machine: the time of a step is forecast; start, stop and memory are
measured in a run that is stopped after its first steps.
"""

from __future__ import annotations

import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import asdict
from datetime import timedelta
from pathlib import Path

from pipeline.cli.commands.command import CommandResult
from pipeline.cli.explain import make_calendar
from pipeline.config.compose import compose_and_check
from pipeline.config.device_checks import check_processes
from pipeline.config.files import find_recipes
from pipeline.config.overrides import hide_secret_values, value_of
from pipeline.config.recipe import Recipe
from pipeline.config.recipe_file import YAML, iterate_texts
from pipeline.core.errors import RecipeError, RunError, UsageError
from pipeline.core.files.paths import RECIPES, expand_home
from pipeline.core.files.tree_diff import format_key
from pipeline.core.host.launchers import CLUSTER_START_S
from pipeline.core.host.limits import read_limits
from pipeline.core.plugins.loading import FLAG, list_loaded_plugins
from pipeline.core.reporter import Reporter
from pipeline.stages.launch.job_file import (
    ENGINES,
    GIB,
    NO_LOCAL,
    JobLimits,
    JobRequest,
    TrialRun,
    make_run_arguments,
    render_job,
    run_trial,
)
from pipeline.stages.runner.resume_command import RESUME

UPPER_RATIO = 1.3
UPPER_MS = 0.1
"""A step with a forecast of x ms takes at most 1.3 x + 0.1 ms, which holds for all 24 steps that
were measured in benchmarks/results/forecast.md."""
MEMORY_RATIO = 1.25
"""Ratio of a job's memory to the peak of a trial run."""
MINUTE_S = 60


def main(
    overrides: Sequence[str],
    to: str,
    processes: int | None,
    image: str | None,
    gpu: str | None,
    minutes: int | None,
    memory_gib: int | None,
) -> CommandResult:
    """Print a job file on stdout, everything else on stderr.

    Without `minutes` or `memory_gib`, these are measured here. The defaults of `processes` and
    `image` come from the recipe and the engine. Raises UsageError for wrong options, RecipeError
    for a recipe that the engine can't run, and RunError if the recipe can't be measured here.
    """
    with redirect_stdout(sys.stderr), Reporter() as reporter:
        engine = ENGINES[to]
        if not engine.file.is_file():
            raise UsageError([f"--to {to}"], f"needs {engine.file}, which is missing")
        recipe = compose_and_check(overrides)
        if processes is None:
            processes = recipe.launch.num_processes if recipe.launch.name == "local" else 1
        _require_runnable(recipe, overrides, processes, to)
        devices = recipe.parallel.num_devices
        gpus = max(1, devices // processes) if recipe.device.uses_cuda else 0
        is_gpu_name = re.fullmatch(r"[\w.-]+", gpu or "") is not None
        if gpu is not None and not (gpus and engine.names_gpus and is_gpu_name):
            raise UsageError([f"--gpu {gpu}"], "must be a kind of GPU, with slurm or skypilot")
        if gpus and gpu is None and to == "skypilot":
            raise UsageError([f"--to {to}"], "needs a kind of GPU, such as --gpu H100")
        sees_local_files = engine.shares_files and image is None
        if not sees_local_files:
            for path in _list_local_files(recipe, overrides):
                reporter.warn(f"{path}: is a file of this machine; the job needs a copy there")
        limits = _find_limits(recipe, overrides, minutes, memory_gib, reporter)
        # A job has the launcher of its machine.
        launch = ["launch=auto", *NO_LOCAL] if recipe.launch.name == "local" else []
        request = JobRequest(
            recipe=recipe.name,
            arguments=make_run_arguments(overrides, [f"{RESUME}=auto", *launch]),
            processes=processes,
            cores=max(1, int(read_limits().cores)),
            gpus=gpus,
            gpu_kind=gpu,
            image=image or engine.image,
            limits=limits,
        )
    text = render_job(engine, request)
    print(text, end="")
    return CommandResult({"engine": to, "file": text, **asdict(request)})


def _require_runnable(recipe: Recipe, overrides: Sequence[str], processes: int, to: str) -> None:
    """Raise RecipeError if the engine's processes can't run the recipe, or can't resume it."""
    problems = []
    launch = ENGINES[to].launch
    if recipe.launch.name not in ("auto", "local", launch):
        rule = f"must be auto or {launch} with --to {to}"
        problems.append(f"launch = {recipe.launch.name}: {rule}")
    if processes > 1 and recipe.parallel.mode == "none":
        problems.append(f"parallel.mode = none: must be data with {processes} processes")
    elif processes > 1:
        problems += check_processes(recipe, processes)
    if recipe.train.until is not None:
        problems.append(f"train.{recipe.train.deadline}: must be train.minutes; jobs start later")
    resume = value_of(overrides, RESUME)
    if resume not in (None, "null", "auto"):
        problems.append(f"{RESUME} = {resume}: must be auto, by which a job continues")
    problems += [
        f"{override!r}: must be printable, without line breaks"
        for override in overrides
        if not override.isprintable()
    ]
    problems += [
        f"{text} would show a secret in the job file; refer to a variable, ${{oc.env:NAME}}"
        for text, override in zip(hide_secret_values(overrides), overrides, strict=True)
        if text != override and "oc.env" not in override
    ]
    if problems:
        raise RecipeError(problems)


def _list_local_files(recipe: Recipe, overrides: Sequence[str]) -> Iterator[str]:
    """Yield files of this machine that the recipe names, as `KEY = PATH`."""
    name = value_of(overrides, "recipe") or ""
    file = expand_home(Path(name)) if name.endswith(YAML) else find_recipes(Path.cwd()).get(name)
    if file is not None and file.parent != RECIPES:
        yield f"+recipe = {file}"
    for plugin in list_loaded_plugins():
        yield f"{FLAG} {plugin.source}"
    for path, text in iterate_texts(recipe.model_dump(mode="json")):
        if os.sep in text and os.path.exists(text):
            yield f"{format_key(path)} = {text}"


def _find_limits(
    recipe: Recipe,
    overrides: Sequence[str],
    minutes: int | None,
    memory_gib: int | None,
    reporter: Reporter,
) -> JobLimits:
    """Return the limits, with a measurement in place of `minutes` or `memory_gib` None."""
    notes = []
    trial = None
    if minutes is None or memory_gib is None:
        with reporter.clock("running the first steps"):
            trial = run_trial(overrides)
    if minutes is None:
        assert trial is not None
        time_s, note = _forecast_run_s(recipe, trial, reporter)
        minutes = math.ceil(time_s / MINUTE_S)
        notes.append(f"time: {note}")
    if memory_gib is None:
        assert trial is not None
        memory_gib = math.ceil(MEMORY_RATIO * trial.memory_bytes / GIB)
        peak_gib = trial.memory_bytes / GIB
        notes.append(f"memory: {MEMORY_RATIO:g} times {peak_gib:.2f} GiB, the most of a run here")
    stop_s = trial.stop_s if trial else None
    if stop_s is None:
        stop_s = recipe.launch.end_seconds
        notes.append(f"grace: by launch.end_seconds, {stop_s:g} s; a stop wasn't measured")
    else:
        notes.append(f"grace: a stop with a checkpoint took {stop_s:.1f} s here")
    # A signal waits for the end of a dispatch.
    grace_s = MINUTE_S * math.ceil((stop_s + recipe.train.dispatch_seconds) / MINUTE_S)
    return JobLimits(MINUTE_S * minutes, grace_s, memory_gib, notes)


def _forecast_run_s(recipe: Recipe, trial: TrialRun, reporter: Reporter) -> tuple[float, str]:
    """Return an upper limit of a run's seconds on one device, and a note with its parts.

    A batch of an evaluation is assumed to take as long as a step, and a checkpoint as long as a
    stop. Raises RunError if a step can't be forecast.
    """
    if recipe.train.minutes is not None:
        time_s = MINUTE_S * recipe.train.minutes + CLUSTER_START_S
        return time_s, f"train.minutes, and {CLUSTER_START_S:,.0f} s to get machines"
    if recipe.parallel.mode == "data":
        # More devices take a part of each batch.
        parallel = recipe.parallel.model_copy(update={"devices": 1, "mesh": None})
        recipe = recipe.model_copy(update={"parallel": parallel})
    # Imported here, since limits that are set need no forecast.
    from pipeline.cli.forecast import forecast_lowered
    from pipeline.inspect.dumps.opened_recipe import build_recipe

    try:
        opened = build_recipe(recipe, reporter)
        forecast, built = forecast_lowered(opened, reporter)
    except RunError as error:
        raise RunError(f"{error}; --minutes N sets a time limit without a forecast") from error
    events = make_calendar(recipe, built.run_schedule).counts
    evals = events["evaluate"] + 1
    steps = built.run_schedule.total + evals * opened.dataset.eval_order.steps_per_epoch
    upper_ms = UPPER_RATIO * forecast.step_ms + UPPER_MS
    stop_s = trial.stop_s or recipe.launch.end_seconds
    saves_s = (events["checkpoint"] + 1) * stop_s
    time_s = steps * upper_ms / 1e3 + saves_s + trial.start_s + CLUSTER_START_S
    note = (
        f"{timedelta(seconds=math.ceil(time_s))}: {steps:,} batches of at most {upper_ms:.3g} ms "
        f"(forecast {forecast.step_ms:.3g} ms), checkpoints {saves_s:.0f} s, start "
        f"{trial.start_s:.0f} s, {CLUSTER_START_S:,.0f} s to get machines"
    )
    return time_s, note
