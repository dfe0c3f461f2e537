"""A run in several processes on this machine, which are started again if one of them dies."""

from __future__ import annotations

import os
from collections.abc import Mapping
from contextlib import suppress
from itertools import count
from pathlib import Path
from typing import Any

from pipeline.checkpoint.restore import FOLDER, list_saved_steps
from pipeline.config.checks import fit_to_processes
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from pipeline.core.host.signals import Signals, handle_signals
from pipeline.core.reporter import Reporter
from pipeline.stages.launch.join import LOCAL
from pipeline.stages.launch.local import ProcessError, run_locally
from pipeline.stages.record import run_directory
from pipeline.stages.record.guards import convert_os_errors
from pipeline.stages.record.summary import Summary
from pipeline.stages.runner.context import RunOptions
from pipeline.stages.runner.open_run import advise_to_resume, place_run
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.parallel.ranks import Ranks


def run_in_processes(recipe: Recipe, options: RunOptions, features: RunFeature) -> Summary:
    """Run in several processes on this machine; return the summary of the first process.

    Every process calls `run`. After the death of a process, they are started again from the last
    checkpoint, up to `launch.restarts` times. Raises the error of the process that failed first,
    and RecipeError for a pruner or callbacks, which the other processes don't have.
    """
    if options.pruner is not None:
        raise RecipeError("launch = local: must be none in a sweep that prunes its trials")
    if options.callbacks:
        problem = "must be none with callbacks from Python; name them in train.callbacks"
        raise RecipeError(f"launch = local: {problem}")
    fitted, folder = place_run(recipe, options, features, Ranks(), recipe.launch.num_processes)
    run_dir = folder.path
    if folder.resuming:
        with convert_os_errors(run_dir):
            run_directory.require_own(run_dir)
    request = {
        "recipe": _make_worker_tree(fitted, run_dir if folder.resuming else None),
        "run_dir": str(run_dir),
        "recipe_folder": None if options.recipe_folder is None else str(options.recipe_folder),
        "changed": dict(options.changed),
        # All processes of a machine have the same clock.
        "started_at": options.started_at,
        "parent": os.getpid(),
    }
    try:
        with handle_signals(options.signals):
            summary = _run_with_restarts(fitted, request, run_dir, options.signals)
    except BaseException:
        if list_saved_steps(run_dir / FOLDER):
            advise_to_resume(fitted, options, run_dir, Reporter())
        raise
    if summary.status == "stopped":
        advise_to_resume(fitted, options, run_dir, Reporter())
    return summary


def _run_with_restarts(
    recipe: Recipe, request: Mapping[str, Any], run_dir: Path, signals: Signals
) -> Summary:
    """Run the processes of a request, and start them again if one of them dies."""
    restarts = recipe.launch.restarts
    for number in count(1):
        try:
            return run_locally(request, run_dir, signals, recipe.launch)
        except ProcessError as error:
            if number > restarts or signals.stop or not error.is_death:
                raise
            resumed = run_dir if (run_dir / run_directory.RECIPE).exists() else None
            restores = recipe.checkpoint.restore is not None
            # Resumed without a checkpoint, a run would begin with fresh weights.
            if resumed and restores and not list_saved_steps(run_dir / FOLDER):
                raise
            recipe = _leave_out_process(recipe)
            processes = recipe.launch.num_processes
            text = f"restart {number} of {restarts} in {processes} of the processes: {error}"
            Reporter().warn(text)
            request = {**request, "recipe": _make_worker_tree(recipe, resumed)}
    raise AssertionError("the last attempt returns or raises")


def _leave_out_process(recipe: Recipe) -> Recipe:
    """Return the recipe with the largest smaller number of processes that it allows.

    Each process has the number of devices that it had. Returns `recipe` if fewer aren't allowed.
    """
    num_before = recipe.launch.num_processes
    least = recipe.launch.min_processes or num_before
    devices_per_process = recipe.parallel.num_devices // num_before
    for processes in range(num_before - 1, least - 1, -1):
        launch = recipe.launch.model_copy(update={"processes": processes})
        layout = {"devices": processes * devices_per_process, "mesh": None}
        parallel = recipe.parallel.model_copy(update=layout)
        with suppress(RecipeError):
            changed = recipe.model_copy(update={"launch": launch, "parallel": parallel})
            return fit_to_processes(changed, processes)
    return recipe


def _make_worker_tree(recipe: Recipe, resumed: Path | None) -> dict[str, Any]:
    """Return the processes' recipe as JSON: it resumes the run in `resumed`, or begins a run."""
    tree = recipe.whole_tree()
    tree["train"]["resume"] = None if resumed is None else str(resumed)
    if resumed is not None:
        # Checkpoints have the weights that the run began with.
        tree["checkpoint"]["restore"] = None
    return tree


class LocalRun(RunFeature):
    """The processes of a run with `launch = local`."""

    def launch(self, recipe: Recipe, options: RunOptions, features: RunFeature) -> Summary | None:
        """Run in several processes; None in one of them."""
        return None if LOCAL in os.environ else run_in_processes(recipe, options, features)
