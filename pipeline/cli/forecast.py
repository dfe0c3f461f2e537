"""`python -m pipeline forecast ...`: the time of a step, before it is compiled.

For an emulated device, its model computes the time. For another device, the times of the step's
parts are added, of which the longest are measured one by one. `--check` also runs steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RunError
from pipeline.core.host.limits import read_limits
from pipeline.core.host.measured_time import LoadWatch, describe_load
from pipeline.core.reporter import Reporter
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, build_recipe
from pipeline.inspect.forecast.host_forecast import (
    HostForecast,
    forecast_run,
    measured_line,
    total_line,
)
from pipeline.stages.autosink.dispatch_costs import OFF, TimedRuns, time_single_step
from pipeline.stages.build import Built
from pipeline.stages.compile import make_compile_inputs
from pipeline.stages.estimate import describe_step
from pipeline.stages.fit_memory import begin_at_once, compile_to_fit
from pipeline.stages.lower import lower

CHECK_S = 3.0
"""Seconds for which `--check` runs steps."""
MIN_CHECK_STEPS = 8
MAX_CHECK_STEPS = 1000


def main(overrides: Sequence[str], *, check: bool = False) -> CommandResult:
    """Print a forecast, and with `check` also a measurement.

    Raises RecipeError for an invalid recipe, RunError if its steps can't be forecast or run, and
    for `check` with an emulated device.
    """
    recipe = compose_and_check(overrides)
    with Reporter() as reporter:
        text, facts = forecast_recipe(recipe, reporter, check=check)
        reporter.print_lines(f"\n{text}")
    return CommandResult(facts)


def forecast_recipe(
    recipe: Recipe, reporter: Reporter, *, check: bool
) -> tuple[str, Mapping[str, Any]]:
    """Return a forecast as text and as figures, both with the measured time if `check` is true."""
    opened = build_recipe(recipe, reporter)
    recipe = opened.recipe
    dataset = opened.dataset
    backend = opened.backend
    estimate = backend.estimate(describe_step(recipe, dataset, opened.built))
    if estimate is not None:
        if check:
            raise RunError("--check: an emulated device can't run steps; leave the flag out")
        return str(estimate), estimate.summary()
    forecast, lowered = forecast_lowered(opened, reporter)
    facts: dict[str, Any] = {**asdict(forecast), "step_ms": forecast.step_ms}
    text = str(forecast)
    if recipe.train.deadline is None:
        num_steps = lowered.run_schedule.total
        facts |= {"steps": num_steps, "steps_s": num_steps * forecast.step_ms / 1e3}
        text += f"\n{total_line(forecast, num_steps)}"
    if not check:
        return text, facts
    executable = compile_to_fit(recipe, dataset, lowered, backend, reporter)
    is_terminal = reporter.console.is_terminal
    with TimedRuns(recipe, lowered.run_schedule, executable, is_terminal=is_terminal) as trials:
        # The least time is used: the first steps are slow, since memory is new to the process and
        # libraries plan their calls.
        steps = int(CHECK_S * 1e3 / time_single_step(trials))
        steps = min(max(steps, MIN_CHECK_STEPS), MAX_CHECK_STEPS)
        measured_ms = float(trials.time(OFF, steps).dispatch_ms.min())
    return f"{text}\n{measured_line(forecast, measured_ms)}", {**facts, "measured_ms": measured_ms}


def forecast_lowered(opened: OpenedRecipe, reporter: Reporter) -> tuple[HostForecast, Built]:
    """Lower a recipe's step, and return its forecast by timed parts, and the lowered step."""
    recipe = opened.recipe
    backend = opened.backend
    lowered = lower(recipe, opened.dataset, opened.built, backend, None, reporter)
    lowered = begin_at_once(recipe, lowered, backend)
    work = make_compile_inputs(recipe, opened.dataset, lowered, backend, reporter)
    load = LoadWatch()
    with reporter.clock("timing the parts of a step"):
        forecast = forecast_run(recipe, work, lowered.run_schedule, backend)
    if (text := describe_load(load.count_foreign_cores(), read_limits().cores)) is not None:
        reporter.warn(text)
    return forecast, lowered
