"""`python -m pipeline forecast ...`: what a step will take, before it is compiled.

On an emulated device that is its model's report; on one that is at hand, the sum of the step's
parts, the heaviest of which are timed one by one. `--check` runs the steps as well.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from pipeline.backends.base import Backend
from pipeline.cli.arguments.usage import asks_for_help, show_usage
from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError, UsageError
from pipeline.core.reporter import Reporter
from pipeline.data.dataset import Dataset
from pipeline.inspect.forecast.host_forecast import checked, forecast_step
from pipeline.stages.autosink.dispatch_costs import OFF, first_look
from pipeline.stages.autosink.timed_runs import TimedRuns
from pipeline.stages.build import Built, build
from pipeline.stages.compile import compile_inputs, compile_programs
from pipeline.stages.data import load_data
from pipeline.stages.estimate import propose
from pipeline.stages.lower import lower
from pipeline.stages.plan_devices import find_plan, with_plan

CHECK = "--check"
CHECK_S, CHECK_STEPS = 3.0, (8, 1000)
"""Seconds for which `--check` runs steps, and the least and most of them."""

HELP = """usage: python -m pipeline forecast [+recipe=NAME] [KEY=VALUE ...] [--check]

Say what a step of a recipe will take on its device, before it is compiled: the sum of its parts,
the heaviest of which are timed here one by one; on an emulated device by its model.

  +recipe=NAME        the recipe, lenet5_digits unless it is given
  KEY=VALUE           keys and parts of the recipe, as for a run
  --check             also compile it, run some steps, and say how far off the forecast was

example: python -m pipeline forecast +recipe=lenet5_digits --check
"""


def main(args: Sequence[str]) -> int:
    """Print a forecast, and with --check what was measured; the exit status is 0.

    Raises UsageError for another flag, RecipeError for an invalid recipe, RunError where its steps
    can't be priced or run, or an emulated device is to be checked.
    """
    if asks_for_help(args):
        return show_usage(HELP)
    flags = [arg for arg in args if arg.startswith("-") and arg != CHECK]
    if flags:
        raise UsageError(flags[:1], "forecast takes KEY=VALUE of one recipe, and --check")
    check = CHECK in args
    recipe = compose_and_check([arg for arg in args if arg != CHECK])
    with Reporter() as reporter:
        reporter.say(f"\n{forecast_recipe(recipe, reporter, check=check)}")
    return 0


def forecast_recipe(recipe: Recipe, reporter: Reporter, *, check: bool) -> str:
    """Return the report of a forecast, and with `check` of the steps that it was compared with."""
    backend = recipe.device.open(recipe.parallel)
    dataset = load_data(recipe, reporter)
    built = build(recipe, dataset, reporter)
    if recipe.parallel.mode == "auto":
        recipe = with_plan(
            recipe, find_plan(recipe, dataset, built, recipe.parallel.plan, reporter)
        )
        backend = recipe.device.open(recipe.parallel)
    proposal = propose(recipe, dataset, built)
    estimate = backend.estimate(proposal)
    if estimate is not None:
        if check:
            raise RunError("--check: an emulated device can't be run; leave the flag out")
        return str(estimate)
    lowered = lower(recipe, dataset, built, backend, None, reporter)
    work = compile_inputs(recipe, dataset, lowered, backend, reporter)
    with reporter.clock("timing the parts of a step"):
        forecast = forecast_step(recipe, work, lowered.run_schedule, backend)
    if not check:
        return str(forecast)
    measured_ms = measure_step(recipe, dataset, lowered, backend, reporter)
    return f"{forecast}\n{checked(forecast, measured_ms)}"


def measure_step(
    recipe: Recipe, dataset: Dataset, built: Built, backend: Backend, reporter: Reporter
) -> float:
    """Return the milliseconds of a step, each dispatched alone; the weights are thrown away."""
    executable = compile_programs(recipe, dataset, built, backend, reporter)
    terminal = reporter.console.is_terminal
    with TimedRuns(recipe, built.run_schedule, executable, terminal=terminal) as trials:
        # The first steps are slow: memory that no one has touched, libraries that plan their calls.
        steps = int(np.clip(CHECK_S * 1e3 / first_look(trials), *CHECK_STEPS))
        return float(trials.time(OFF, steps).dispatch_ms.min())
