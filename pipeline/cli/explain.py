"""`python -m pipeline explain ...`: predict and measure the gain of sinks for a recipe.

The recipe is composed and compiled as for a run, and its steps are timed. The weights are
discarded: the only file is `explain.json`, in the folder that `--out` names.
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np

from pipeline.backends.base import SinkPrice
from pipeline.backends.loading.loader import Loader
from pipeline.backends.sink_choice import Cost, SinkChoice, choose, choose_no_sink
from pipeline.cli.commands.command import CommandResult
from pipeline.config.compose import compose_and_check
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.files.atomic_write import convert_write_errors, format_json, write_whole
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import RunSchedule
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, build_recipe
from pipeline.stages.autosink.choose_sink import (
    explain_one_step_sinks,
    list_mechanisms,
    make_bounds,
    make_modelled_costs,
)
from pipeline.stages.autosink.dispatch_costs import (
    LEAST_ROUNDS,
    MOST_ROUNDS,
    OFF,
    SINGLES,
    SINKS,
    TimedRuns,
    Variant,
    compute_lower_quartile,
    estimate_gain_error,
    measure,
    time_single_step,
)
from pipeline.stages.autosink.sink_explanation import (
    Achieved,
    Calendar,
    Dispatch,
    ExplainedRun,
    Explanation,
    Memory,
)
from pipeline.stages.estimate import describe_step, report_shardings
from pipeline.stages.fit_memory import compile_to_fit
from pipeline.stages.lower import lower

FILE = "explain.json"
BUDGET_S = 6.0
"""Seconds to measure dispatches, and again to time the choice."""
TRIAL_S = 0.2
"""Approximate seconds of each run with or without sinks in the final comparison."""
BUSY = 0.5
"""Load per processor above which timings are unreliable."""
SHOWN_EVENTS = 4
"""Number of steps with events that are printed as examples."""


def main(overrides: Sequence[str], out: Path | None = None) -> CommandResult:
    """Print costs and gains of the sinks of a recipe, and write them into the folder `out`.

    Raises RecipeError for an invalid recipe, RunError if its steps can't be run.
    """
    recipe = compose_and_check(overrides)
    if out is not None:
        with convert_write_errors(out):
            out.mkdir(parents=True, exist_ok=True)
    with Reporter() as reporter:
        load = os.getloadavg()[0]
        processors = os.cpu_count() or 1
        if load > BUSY * processors:
            reason = "other programs use them, so times will vary"
            reporter.warn(f"load {load:.1f} on {processors} processors: {reason}")
        explanation = explain_recipe(recipe, reporter)
        reporter.print_lines(f"\n{explanation}")
    if out is not None:
        with convert_write_errors(out / FILE):
            write_whole(out / FILE, format_json(explanation.to_dict(), indent=2) + "\n")
    return CommandResult(explanation.to_dict())


def explain_recipe(recipe: Recipe, reporter: Reporter) -> Explanation:
    """Build and compile a recipe and measure its steps, or use the model of an emulated device."""
    opened = build_recipe(recipe, reporter)
    recipe = opened.recipe
    dataset = opened.dataset
    backend = opened.backend
    modelled = _explain_by_model(opened)
    if modelled is not None:
        report_shardings(recipe, dataset, opened.built, reporter)
        return modelled
    built = lower(recipe, dataset, opened.built, backend, None, reporter)
    executable = compile_to_fit(recipe, dataset, built, backend, reporter)
    run_schedule = built.run_schedule
    bounds = make_bounds(recipe, run_schedule, executable)
    run = _describe_run(recipe, backend.describe()["device"], run_schedule)
    make_explanation = partial(Explanation, run, bounds, make_calendar(recipe, run_schedule))
    memory = measure_memory(executable.loader)
    is_terminal = reporter.console.is_terminal
    with (
        reporter.clock("measuring sinks"),
        TimedRuns(recipe, run_schedule, executable, is_terminal=is_terminal) as trials,
    ):
        single_ms = time_single_step(trials)
        reason = explain_one_step_sinks(single_ms, bounds)
        if reason is not None:
            return make_explanation(choose_no_sink(single_ms, reason), memory=memory)
        mechanisms = list_mechanisms(recipe.train.mechanism, executable)
        costs, singles_ms = measure(trials, single_ms, mechanisms, BUDGET_S)
        choice = choose(costs, bounds)
        achieved = measure_gain(trials, choice)
    dispatch = make_dispatch(singles_ms, costs.find(choice.mechanism))
    return make_explanation(choice, costs, dispatch, memory, achieved)


def _explain_by_model(opened: OpenedRecipe) -> Explanation | None:
    """Return the explanation by the model of an emulated device; None for another device."""
    recipe = opened.recipe
    run_schedule = opened.built.run_schedule
    bounds = make_bounds(recipe, run_schedule)
    costs = []

    def choose_sink(price: SinkPrice) -> SinkChoice:
        costs.append(make_modelled_costs(price))
        return choose(costs[-1], bounds)

    proposal = describe_step(recipe, opened.dataset, opened.built)
    estimate = opened.backend.estimate(replace(proposal, choose_sink=choose_sink))
    if estimate is None or estimate.choice is None:
        return None
    return Explanation(
        _describe_run(recipe, estimate.device, run_schedule),
        bounds,
        make_calendar(recipe, run_schedule),
        estimate.choice,
        costs[-1],
        modelled=True,
        track_record=estimate.track_record,
        time_range=estimate.time_range,
        communication=estimate.communication,
    )


def _describe_run(recipe: Recipe, device: str, run_schedule: RunSchedule) -> ExplainedRun:
    sink_steps = None if recipe.train.sink_size == "auto" else run_schedule.sink_steps
    return ExplainedRun(recipe.name, device, recipe.train.batch_size, sink_steps)


def make_dispatch(singles_ms: np.ndarray, cost: Cost) -> Dispatch:
    """Return the median and the p90 of a dispatch's overhead in us: the time of a step that is
    dispatched alone, minus the time of a step in a sink by the chosen mechanism."""
    median_us, p90_us = 1000 * (np.quantile(singles_ms, (0.5, 0.9)) - cost.step_ms)
    return Dispatch(float(median_us), float(p90_us))


def measure_memory(loader: Loader) -> Memory:
    """Return the bytes that a loader holds on the device, and the bytes copied for a step."""
    window = loader.get_window(0)
    steps = window.max_steps
    inputs = window.inputs
    copied = [inputs.indices, inputs.epochs, inputs.counts]
    copied += [] if inputs.resident else list(inputs.columns.values())
    copied_bytes = sum(array.nbytes for array in jax.tree.leaves(copied))
    return Memory(inputs.resident, loader.device_bytes, round(copied_bytes / steps), steps)


def make_calendar(recipe: Recipe, run_schedule: RunSchedule) -> Calendar:
    """Return the steps of a run's events. Ends of sinks aren't counted as events."""
    total_steps = run_schedule.total
    steps_by_event: dict[str, np.ndarray] = {}
    for event, periods in list_event_periods(recipe, run_schedule.steps_per_epoch).items():
        multiples = [np.arange(period, total_steps + 1, period) for period in periods]
        # An event without a period has no steps; numpy can't concatenate an empty list.
        steps_by_event[event.value] = np.unique(np.concatenate([np.arange(0), *multiples]))
    all_steps = np.unique(np.concatenate(list(steps_by_event.values())))
    examples = []
    for step in all_steps[:SHOWN_EVENTS].tolist():
        names = [name for name, steps in steps_by_event.items() if step in steps]
        examples.append((step, ", ".join(names)))
    longest_steps = int(np.diff(all_steps, prepend=0, append=total_steps).max())
    counts = {name: len(steps) for name, steps in steps_by_event.items()}
    return Calendar(counts, tuple(examples), longest_steps, total_steps)


def measure_gain(trials: TimedRuns, choice: SinkChoice) -> Achieved | None:
    """Time training with and without the chosen sinks, in turns; None if no sinks were chosen."""
    if choice.size is None:
        return None
    variant = Variant(choice.size, choice.mechanism)
    num_sinks = max(SINKS, round(1000 * TRIAL_S / (choice.size * choice.step_ms)) + 1)
    num_singles = max(SINGLES, round(1000 * TRIAL_S / choice.off_ms))
    round_s = (num_singles * choice.off_ms + num_sinks * choice.size * choice.step_ms) / 1e3
    rounds = int(np.clip(BUDGET_S / round_s, LEAST_ROUNDS, MOST_ROUNDS))
    off_ms = []
    sink_ms = []
    for _ in range(rounds):
        off_ms.append(trials.time(OFF, num_singles).step_ms)
        sink_ms.append(trials.time(variant, num_sinks * choice.size).step_ms)
    gain_error = estimate_gain_error(off_ms, sink_ms)
    return Achieved(
        compute_lower_quartile(off_ms), compute_lower_quartile(sink_ms), rounds, gain_error
    )
