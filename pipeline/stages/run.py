"""A run: the stages in order."""

from __future__ import annotations

import os
import time
from collections.abc import Generator, Mapping
from dataclasses import asdict, replace
from functools import partial
from typing import Any

from pipeline.backends.base import Backend, Estimate
from pipeline.checkpoint.host_state import HostState
from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.recipe import Recipe
from pipeline.core.host.environment import require_usable_environment
from pipeline.core.host.process_start import collect_seldom
from pipeline.core.host.signals import Interrupted
from pipeline.data.dataset import Dataset
from pipeline.engine.callbacks.events import SinkReport
from pipeline.engine.history import History
from pipeline.engine.loop import exhaust, train
from pipeline.engine.monitors.metrics_log import require_logs
from pipeline.engine.monitors.observers import Observers, open_observers
from pipeline.stages.autosink.choose_sink import SinkPlan, choose_sink, chooses_sink, resume_sink
from pipeline.stages.build import Built, build, read_rate_files
from pipeline.stages.compile import (
    CompileOptions,
    compile_programs,
    make_program_key,
    write_figures,
)
from pipeline.stages.data import declare_data, load_data
from pipeline.stages.estimate import estimate_cost
from pipeline.stages.launch.join import LOCAL, join_processes
from pipeline.stages.lower import lower
from pipeline.stages.plan_devices import plan_devices
from pipeline.stages.record.guards import record_time
from pipeline.stages.record.summary import Summary, list_versions
from pipeline.stages.runner.context import CompiledRun, RunContext, RunOptions
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.stages.runner.initial_state import initial_state, read_restored
from pipeline.stages.runner.open_run import conclude_run, open_run, record_data, run_in_processes
from pipeline.stages.runner.open_training import (
    make_callbacks,
    open_training,
    record_overflows,
    require_ready_callbacks,
)
from pipeline.training.parallel.devices import context_line


def run(recipe: Recipe, options: RunOptions) -> Summary:
    """Run the stages that a recipe names and return the summary.

    Writes into the run that is resumed, else `options.run_dir`, else a new directory under
    `outputs/`. Raises PipelineError when the run can't be done; summary.json says so too.
    """
    return exhaust(run_in_sinks(recipe, options))


def run_in_sinks(recipe: Recipe, options: RunOptions) -> Generator[SinkReport, None, Summary]:
    """Run as `run` does, and yield the report of each sink once it has been evaluated.

    The caller iterates to the end; to end earlier, it notes a stop in `options.signals`.
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
        # A signal has ended one of several processes, whose summary says so.
        if summary is None:
            raise
    return summary


def run_stages(context: RunContext) -> Generator[SinkReport, None, None]:
    """Run the stages in order, and end early if `stages` names no later one; yield each sink."""
    recipe = context.recipe
    reporter = context.reporter
    summary = context.summary
    inspection = context.options.inspection
    trains = "train" in recipe.stages
    evaluates = "eval" in recipe.stages
    require_ready_callbacks(recipe)
    rate_files = read_rate_files(recipe.train)
    backend = open_backend(context)

    with record_time(summary, "data_s"):
        dataset = declare_data(recipe, reporter) or load_data(recipe, reporter)
    context = record_data(context, dataset, backend.device, rate_files)
    if "build" not in recipe.stages:
        return
    with record_time(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    summary.parameters = built.parameters
    if "compile" not in recipe.stages:
        return

    if recipe.parallel.mode == "auto":
        recipe = plan_devices(recipe, dataset, built, context.folder, reporter)
        backend = recipe.device.open(recipe.parallel)
    # Weights that can't be read are reported before anything is compiled.
    restored = read_restored(context, dataset, built) if trains or evaluates else None
    estimate = estimate_cost(recipe, dataset, built, backend, context.folder, reporter)
    if estimate is not None:
        summary.modelled = dict(estimate.summary())
    if estimate is not None and not (trains or evaluates):
        # A run that is only priced needs no program of the processor that computes for it.
        return

    total_steps = built.run_schedule.total
    built = inspection.shorten(context, built, backend)
    open_programs = context.options.programs or lower_and_compile
    run = open_programs(context, recipe, dataset, built, backend)
    if not (trains or evaluates):
        return

    state, host = initial_state(run, restored)
    if trains:
        sink = plan_sinks(run, estimate, host)
        summary.sink = sink.summary()
        schedule = replace(run.built.run_schedule, sink_steps=sink.size)
        run = replace(run, built=replace(run.built, run_schedule=schedule))
    profile = inspection.open_profile(run, total_steps, int(state.step))
    run = profile.run
    callbacks = make_callbacks(context) if trains else ()
    dumps = inspection.open_dumps(run) if trains else None
    # From here on nothing refuses the run, except for a bad log.
    require_logs(context.run_dir, int(state.step), get_log_marks(context, host))
    context.folder.accepted.release()
    history = History(int(state.step))
    with open_run_observers(run, history, estimate, host) as observers:
        summary.logs = observers.log_flaws()
        evaluations = Evaluations(run, observers)
        if trains:
            collect_seldom()
            evaluations.show_start()
            opened = open_training(run, sink, evaluations, history, callbacks, dumps)
            with profile.open(), opened as training:
                state = yield from train(
                    training.program, state, training.schedule, training.hooks, host, history
                )
            record_overflows(context, state)
            profile.conclude(estimate, state)
        if evaluates and history.status == "done":
            check_signals(context)
            evaluations.conclude(state, history)


def lower_and_compile(
    context: RunContext,
    recipe: Recipe,
    dataset: Dataset,
    built: Built,
    backend: Backend,
    *,
    keeps: bool = False,
) -> CompiledRun:
    """Lower a step and compile its programs by `recipe`, which may be the planned one.

    With `keeps`, for a process whose code is what is on disk, programs that such a process has
    written are found without tracing the step.
    """
    folder = context.folder
    reporter = context.reporter
    built = lower(recipe, dataset, built, backend, folder, reporter)
    alone = context.ranks.size == 1 and recipe.profile.mode == "off"
    key = None
    if keeps and alone:
        assert context.process is not None, "the only process has its origin"
        key = make_program_key(asdict(context.process), recipe, built)
    evaluates_later = alone and "train" in recipe.stages and recipe.parallel.mode == "none"
    options = CompileOptions(key, evaluates_later)
    executable = compile_programs(recipe, dataset, built, backend, reporter, options)
    context.summary.time["compile_s"] = executable.report.compile_s
    folder.accepted.add(partial(write_figures, folder.path, executable.report))
    return CompiledRun(context, dataset, built, backend, executable)


def open_backend(context: RunContext) -> Backend:
    """Open the recipe's devices, and report what runs on several."""
    recipe = context.recipe
    backend = recipe.device.open(recipe.parallel)
    context.summary.versions = list_versions(backend.describe())
    if recipe.parallel.mode != "none":
        line = context_line(recipe.parallel, recipe.train.batch_size, context.ranks)
        context.reporter.stage("parallel", line)
    return backend


def plan_sinks(run: CompiledRun, estimate: Estimate | None, host: HostState) -> SinkPlan:
    """Return the sinks of the run; several processes measure none."""
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
    """Open the observers; only the first process of a run has any."""
    context = run.context
    recipe = context.recipe
    if not context.ranks.is_first:
        return Observers([], None)
    settings = replace(
        make_observer_settings(recipe),
        scalars=bool(recipe.train.callbacks or context.options.callbacks),
        unfinished=host.unfinished_boundary is not None,
        unit=run.dataset.unit,
        estimate=estimate,
        lock=context.lock,
    )
    schedule = run.built.run_schedule
    reporter = context.reporter
    marks = get_log_marks(context, host)
    return open_observers(settings, context.run_dir, schedule, history.step, reporter, marks)


def get_log_marks(context: RunContext, host: HostState) -> Mapping[str, Any] | None:
    """Return the marks of the logs in the checkpoint that the run goes on from, None without."""
    return host.logs if context.resuming else None


def check_signals(context: RunContext) -> None:
    """Raise Interrupted in all processes if the first one has noted a signal to stop."""
    signals = context.options.signals
    stop = context.ranks.agree(lambda: signals.stop)
    if stop is not None:
        signals.stop = stop
        signals.check()
