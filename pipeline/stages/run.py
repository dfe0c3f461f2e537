"""A run: the stages in order, and its features at their moments."""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.core.host.process_start import require_usable_environment
from pipeline.core.host.signals import Interrupted
from pipeline.engine.loop import exhaust, train
from pipeline.stages.autosink.sink_plan import make_sink_plan
from pipeline.stages.build import build, fingerprint_rate_files
from pipeline.stages.data import declare_data, load_data
from pipeline.stages.runner.context import BuiltRun
from pipeline.stages.runner.evaluations import open_evaluations
from pipeline.stages.runner.initial_state import make_initial_state, read_restored
from pipeline.stages.runner.open_run import (
    conclude_run,
    open_backend,
    open_run,
    record_data,
    record_time,
)
from pipeline.stages.runner.open_training import (
    make_callbacks,
    open_training,
    record_overflows,
    require_ready_callbacks,
)
from pipeline.stages.runner.run_features import open_features
from pipeline.training.parallel.ranks import Ranks

if TYPE_CHECKING:
    from pipeline.backends.base import Estimate
    from pipeline.config.recipe import Recipe
    from pipeline.engine.callbacks.callback import SinkReport
    from pipeline.stages.autosink.sink_plan import SinkPlan
    from pipeline.stages.fine_tuning import Restored
    from pipeline.stages.record.summary import Summary
    from pipeline.stages.runner.context import CompiledRun, RunContext, RunOptions


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
    features = open_features(recipe)
    launched = features.launch(recipe, options, features)
    if launched is not None:
        return launched
    summary = None
    try:
        with (
            features.join(recipe) as ranks,
            open_run(recipe, options, features, ranks or Ranks()) as context,
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
    features = context.features
    runs_steps = bool({"train", "eval"} & set(recipe.stages))
    require_ready_callbacks(recipe)
    features.begin(context)
    rate_files = fingerprint_rate_files(recipe.train)
    backend = open_backend(context)

    context.poll_signals()
    with record_time(summary, "data_s"):
        dataset = declare_data(recipe, reporter) or load_data(recipe, reporter)
    dataset = features.change_data(context, dataset)
    context = record_data(context, dataset, backend.device, rate_files)
    if "build" not in recipe.stages:
        return

    context.poll_signals()
    with record_time(summary, "build_s"):
        built = build(recipe, dataset, reporter)
    summary.parameters = built.parameters
    if "compile" not in recipe.stages:
        return

    # Imported here, since recipes without this stage don't need it.
    from pipeline.stages.runner.programs import lower_and_compile

    context.poll_signals()
    built_run = features.plan(BuiltRun(context, recipe, dataset, built, backend))
    # Weights that can't be read are reported before anything is compiled.
    restored = read_restored(context, dataset, built) if runs_steps else None
    estimate = features.price(built_run)
    if estimate is not None and not runs_steps:
        # The price needs no compiled programs.
        return
    context.poll_signals()
    open_programs = context.options.programs or lower_and_compile
    run = open_programs(features.shorten(built_run))
    context.poll_signals()
    if runs_steps:
        yield from train_and_evaluate(run, restored, estimate)


def train_and_evaluate(
    run: CompiledRun, restored: Restored | None, estimate: Estimate | None
) -> Generator[SinkReport, None, None]:
    """Train and evaluate with the run's programs, and yield the report of each sink.

    `estimate` has the modelled times of an emulated device; None on other devices.
    """
    stages = run.context.recipe.stages
    features = run.context.features
    state, host_state = make_initial_state(run, restored)
    step = int(state.step)
    if "train" in stages:
        with record_time(run.context.summary, "sinks_s"):
            sink = features.choose_sinks(run, estimate, host_state) or plan_sinks(run)
        run = features.prepare(with_sinks(run, sink), sink, step)
        callbacks = make_callbacks(run.context)
        features.check(run)
    with open_evaluations(run, step, estimate, host_state) as evaluations:
        if "train" in stages:
            opened = open_training(run, sink, evaluations, callbacks)
            with features.train(run), opened as (program, schedule, hooks):
                history = evaluations.history
                state = yield from train(program, state, schedule, hooks, host_state, history)
            record_overflows(run.context, state)
            features.conclude_training(run, estimate, state)
        if evaluations.history.status == "done":
            if "eval" in stages:
                evaluations.conclude(state)
            features.conclude(run, state)


def plan_sinks(run: CompiledRun) -> SinkPlan:
    """Return the sinks that the recipe of a run has."""
    train = run.context.recipe.train
    return make_sink_plan(train, run.built.run_schedule, run.executable, run.backend)


def with_sinks(run: CompiledRun, sink: SinkPlan) -> CompiledRun:
    """Return the run with these sinks, which its summary has too."""
    run.context.summary.sink = sink.summary()
    run_schedule = replace(run.built.run_schedule, sink_steps=sink.size)
    return replace(run, built=replace(run.built, run_schedule=run_schedule))
