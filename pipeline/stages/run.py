"""A run: the stages in order."""

from __future__ import annotations

import os
import time
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np

from pipeline.backends.base import Backend, Estimate
from pipeline.checkpoint.host_state import HostState
from pipeline.config.deadline import find_deadline
from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.recipe import Recipe
from pipeline.core.host.environment import require_usable_environment
from pipeline.core.host.process_start import collect_seldom
from pipeline.core.host.signals import Interrupted
from pipeline.engine.callbacks.events import SinkReport
from pipeline.engine.history import History
from pipeline.engine.loop import exhaust, train
from pipeline.engine.monitors.metrics_log import require_logs
from pipeline.engine.monitors.observers import Observers, open_observers
from pipeline.stages.autosink.choose_sink import SinkPlan, choose_sink, chooses_sink, resume_sink
from pipeline.stages.build import build, fingerprint_rate_files
from pipeline.stages.choose_steps import freeze_steps
from pipeline.stages.data import declare_data, load_data
from pipeline.stages.estimate import estimate_cost
from pipeline.stages.launch.join import LOCAL, join_processes
from pipeline.stages.launch.local_run import run_in_processes
from pipeline.stages.plan_devices import plan_devices
from pipeline.stages.private_run import open_secret, share_secret
from pipeline.stages.record.guards import record_time
from pipeline.stages.record.summary import Summary, list_versions
from pipeline.stages.runner.context import CompiledRun, RunContext, RunOptions
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.stages.runner.initial_state import make_initial_state, read_restored
from pipeline.stages.runner.open_run import conclude_run, open_run, record_data
from pipeline.stages.runner.open_training import (
    make_callbacks,
    open_training,
    record_overflows,
    require_ready_callbacks,
)
from pipeline.stages.runner.programs import lower_and_compile
from pipeline.training.parallel.devices import describe_layout
from pipeline.training.state import TrainState

if TYPE_CHECKING:
    from pipeline.stages.warm_start import Restored


def run(recipe: Recipe, options: RunOptions) -> Summary:
    """Run the stages that a recipe names, and return the summary.

    Writes into the directory of the run to resume, else into `options.run_dir`, else into a new
    directory under `outputs/`. Raises PipelineError if the run fails; summary.json has the reason.
    """
    return exhaust(run_in_sinks(recipe, options))


def run_in_sinks(recipe: Recipe, options: RunOptions) -> Generator[SinkReport, None, Summary]:
    """Run the stages, and yield the report of each sink after its evaluation.

    The caller must iterate to the end. To end earlier, it sets `options.signals.stop`.
    """
    called_at = time.perf_counter()
    require_usable_environment()
    if recipe.launch.name == "local" and LOCAL not in os.environ:
        return run_in_processes(recipe, options)
    summary = None
    try:
        with (
            join_processes(recipe, os.environ) as ranks,
            open_run(recipe, options, ranks) as context,
        ):
            summary = context.summary
            summary.time["start_s"] = called_at - options.started_at
            with conclude_run(context):
                yield from run_stages(context)
    except Interrupted:
        # With several processes the signal is raised here. If the run is open, its summary has it.
        if summary is None:
            raise
    return summary


def run_stages(context: RunContext) -> Generator[SinkReport, None, None]:
    """Run the stages of the recipe in order, and yield the report of each sink."""
    recipe = context.recipe
    reporter = context.reporter
    summary = context.summary
    runs_steps = bool({"train", "eval"} & set(recipe.stages))
    require_ready_callbacks(recipe)
    end_at = find_deadline(recipe.train, context.options.started_at)
    rate_files = fingerprint_rate_files(recipe.train)
    backend = open_backend(context)

    context.poll_signals()
    with record_time(summary, "data_s"):
        dataset = declare_data(recipe, reporter) or load_data(recipe, reporter)
    secret = open_secret(context)
    dataset = share_secret(dataset, secret)
    context = record_data(context, dataset, backend.device, rate_files)
    if "build" not in recipe.stages:
        return
    context.poll_signals()
    with record_time(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    summary.parameters = built.parameters
    if "compile" not in recipe.stages:
        return

    context.poll_signals()
    if recipe.parallel.mode == "auto":
        recipe = plan_devices(recipe, dataset, built, context.folder, reporter)
        backend = recipe.device.open(recipe.parallel)
    # Weights that can't be read are reported before anything is compiled.
    restored = read_restored(context, dataset, built) if runs_steps else None
    estimate = estimate_cost(recipe, dataset, built, backend, context.folder, reporter)
    if estimate is not None:
        summary.modelled = dict(estimate.summary())
        if not runs_steps:
            # The price needs no compiled programs.
            return
    total_steps = built.run_schedule.total
    context.poll_signals()
    # A profile may train fewer steps.
    built = context.options.inspection.shorten(context, built, backend)
    open_programs = context.options.programs or lower_and_compile
    run = open_programs(context, recipe, dataset, built, backend)
    context.poll_signals()
    if runs_steps:
        yield from train_and_evaluate(run, restored, secret, estimate, end_at, total_steps)


def train_and_evaluate(
    run: CompiledRun,
    restored: Restored | None,
    secret: np.ndarray | None,
    estimate: Estimate | None,
    end_at: float | None,
    total_steps: int,
) -> Generator[SinkReport, None, None]:
    """Train and evaluate with the run's programs, and yield the report of each sink.

    `secret` is uint32 (4,); None unless the run is private. `end_at` is the deadline of the command
    by `time.perf_counter`; None without one. `total_steps` is the run's length before a profile
    shortens it.
    """
    context = run.context
    recipe = context.recipe
    summary = context.summary
    inspection = context.options.inspection
    trains = "train" in recipe.stages
    state, host = make_initial_state(run, restored, secret)
    if trains:
        sink = plan_sinks(run, estimate, host)
        summary.sink = sink.summary()
        run_schedule = replace(run.built.run_schedule, sink_steps=sink.size)
        run = replace(run, built=replace(run.built, run_schedule=run_schedule))
        if end_at is not None:
            run = freeze_steps(run, sink, end_at, context.options.programs or lower_and_compile)
            context = run.context
            total_steps = run.built.run_schedule.total
    profile = inspection.open_profile(run, total_steps, int(state.step))
    run = profile.run
    callbacks = make_callbacks(context) if trains else ()
    dumps = inspection.open_dumps(run) if trains else None
    # This is the last check, and the writes that wait for all checks follow.
    log_marks = host.logs if context.resuming else None
    require_logs(context.run_dir, int(state.step), log_marks)
    context.folder.accepted.release()
    history = History(int(state.step))
    with open_run_observers(run, history, estimate, host) as observers:
        summary.logs = observers.log_flaws()
        evaluations = Evaluations(run, observers)
        if trains:
            collect_seldom()
            evaluations.show_start()
            opened = open_training(run, sink, evaluations, history, callbacks, dumps)
            with profile.open(), opened as (program, schedule, hooks):
                state = yield from train(program, state, schedule, hooks, host, history)
            record_overflows(context, state)
            profile.conclude(estimate, state)
        if history.status == "done":
            conclude(evaluations, state, history)


def conclude(evaluations: Evaluations, state: TrainState, history: History) -> None:
    """Evaluate the final state of a run, audit its privacy, and measure its robustness."""
    run = evaluations.run
    context = run.context
    recipe = context.recipe
    evaluates = "eval" in recipe.stages
    if evaluates:
        check_signals(context)
        evaluations.conclude(state, history)
    if "train" in recipe.stages and recipe.privacy is not None and recipe.privacy.audit:
        # Imported here, since few runs need it.
        from pipeline.stages.audit_canaries import audit

        context.summary.privacy["audit"] = audit(run, state)
    if evaluates and recipe.eval.robustness:
        from pipeline.stages.measure_robustness import conclude_robustness

        conclude_robustness(run, state)


def open_backend(context: RunContext) -> Backend:
    """Open the recipe's devices, and report how several devices share a batch."""
    recipe = context.recipe
    backend = recipe.device.open(recipe.parallel)
    context.summary.versions = list_versions(backend.describe())
    if recipe.parallel.mode != "none":
        line = describe_layout(recipe.parallel, recipe.train.batch_size, context.ranks)
        context.reporter.print_stage("parallel", line)
    return backend


def plan_sinks(run: CompiledRun, estimate: Estimate | None, host: HostState) -> SinkPlan:
    """Return the sinks of the run. For `auto` with several processes, a sink is an epoch."""
    recipe = run.context.recipe
    reporter = run.context.reporter
    schedule = run.built.run_schedule
    if chooses_sink(recipe.train) and run.context.ranks.size > 1:
        return SinkPlan(schedule.steps_per_epoch, "loop", "not measured by several processes")
    if chooses_sink(recipe.train) and host.sink is not None:
        return resume_sink(host.sink, reporter)
    return choose_sink(recipe, schedule, run.executable, run.backend, estimate, reporter)


def open_run_observers(
    run: CompiledRun, history: History, estimate: Estimate | None, host: HostState
) -> Observers:
    """Open the observers of the first process; other processes have none."""
    context = run.context
    recipe = context.recipe
    if not context.ranks.is_first:
        return Observers([], None)
    settings = replace(
        make_observer_settings(recipe),
        has_scalars=bool(recipe.train.callbacks or context.options.callbacks),
        is_unfinished=host.unfinished_boundary is not None,
        unit=run.dataset.unit,
        estimate=estimate,
        lock=context.lock,
    )
    schedule = run.built.run_schedule
    reporter = context.reporter
    marks = host.logs if context.resuming else None
    return open_observers(settings, context.run_dir, schedule, history.step, reporter, marks)


def check_signals(context: RunContext) -> None:
    """Raise Interrupted in all processes if the first process got a signal to stop."""
    signals = context.options.signals
    stop = context.ranks.agree(lambda: signals.stop)
    if stop is not None:
        signals.stop = stop
        signals.check()
