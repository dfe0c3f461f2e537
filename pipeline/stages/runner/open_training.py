"""Opening of training: its checkpoints, callbacks, rollbacks and monitors, and its results."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict
from functools import partial
from typing import TYPE_CHECKING, Any

from pipeline.checkpoint.checkpoint_folder import FOLDER, list_saved_steps
from pipeline.config.recipe import EarlyStopSpec, Recipe
from pipeline.config.resolved_settings import list_event_periods, schedule_events
from pipeline.core.errors import RecipeError, first_line, get_exit_status
from pipeline.core.files.value_text import show
from pipeline.core.host.signals import end_with
from pipeline.engine.callback_calls import Callbacks, NoCallbacks, RunView
from pipeline.engine.callbacks.callback import Callback, Monitor
from pipeline.engine.early_stop import EarlyStop
from pipeline.engine.history import Examination, History
from pipeline.engine.hooks import Deadline, Hooks, NoRollbacks, Rollbacks, Saves, do_nothing
from pipeline.engine.loop import Program
from pipeline.engine.monitors.observers import Observers
from pipeline.engine.schedule import Event, Schedule, is_due
from pipeline.stages.record.run_directory import HeldWrites
from pipeline.stages.runner.context import CompiledRun, RunContext
from pipeline.stages.runner.evaluations import Evaluations
from pipeline.stages.runner.open_run import record_time
from pipeline.training.component_specs import list_metric_directions
from pipeline.training.features.loss_scales import get_loss_scale_state
from pipeline.training.features.non_finite_steps import Rollback
from pipeline.training.parallel.state_sharing import gather_arrays
from pipeline.training.state import TrainState, count_bytes
from pipeline.training.step_feature import StepFeature
from pipeline.training.telemetry import Telemetry

if TYPE_CHECKING:
    from pipeline.checkpoint.checkpointer import Checkpoints, NoCheckpoints
    from pipeline.stages.autosink.sink_plan import SinkPlan


class AdvanceMonitor(Monitor):
    """Monitor that allows a resumed run to change its directory after its first new step."""

    def __init__(self, advanced: HeldWrites) -> None:
        self._advanced = advanced

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Do the writes that wait for the first new step."""
        self._advanced.release()


@contextmanager
def open_training(
    run: CompiledRun,
    sink: SinkPlan,
    evaluations: Evaluations,
    callbacks: Sequence[Callback],
) -> Iterator[tuple[Program, Schedule, Hooks]]:
    """Yield the arguments of `train`, and record the results in the summary at the end.

    In the body, the first signal to stop raises nothing. The caller raises it once all files are on
    disk.
    """
    context = run.context
    built = run.built
    executable = run.executable
    recipe = context.recipe
    observers = evaluations.observers
    signals = context.options.signals
    pruner = context.options.pruner
    _prepare_folder(context)
    with signals.hold_stops(), ExitStack() as stack:
        periods = list_event_periods(recipe, built.run_schedule.steps_per_epoch)
        save_periods = periods[Event.CHECKPOINT]
        checkpoints = _open_checkpoints(evaluations, save_periods, stack)
        # Imported here, since the run trains now.
        from pipeline.stages.runner.outlook import open_outlook

        with record_time(context.summary, "outlook_s"):
            outlook = open_outlook(run, sink, evaluations.history.step)
        every_s = recipe.checkpoint.save_seconds
        # Each process has a part of the state, which checkpoints gather.
        is_shared = recipe.parallel.mode != "data" and context.ranks.size > 1
        hooks = Hooks(
            monitors=_list_monitors(run, observers, outlook),
            evaluate=outlook.time_evaluations(evaluations.evaluate_unless_stopped),
            evaluate_seconds=recipe.eval.every_seconds,
            saves=Saves(checkpoints, every_s, sink.host_entry, observers.log_marks),
            callbacks=_open_callbacks(evaluations, callbacks),
            early_stop=make_early_stop(recipe.monitor.early_stop),
            prune=lambda verdict: None if pruner is None else pruner.prune_reason or verdict,
            deadline=context.deadline,
            rollbacks=_make_rollbacks(context, save_periods, checkpoints),
            on_non_finite_step=recipe.train.on_nan.name,
            examine=partial(_examine, run),
            dump=context.features.see_state,
            collect=_make_collector(run, observers),
            measure=partial(_measure, built.step_config.list_acting("measure")),
            gather=gather_arrays if is_shared else None,
            signals=signals,
            agree=context.ranks.agree,
        )
        rate_columns = recipe.train.rate_columns
        program = Program(executable, sink.mechanism, built.learning_rates, rate_columns)
        stack.callback(executable.loader.close)
        record = partial(_record_results, run, evaluations.history, hooks)
        stack.callback(record)
        stack.enter_context(end_with(record))
        stack.callback(outlook.keep, evaluations.history)
        if checkpoints is not None:
            stack.enter_context(end_with(checkpoints.finish))
        shown = context.features.state_steps, context.features.state_periods
        yield program, schedule_events(recipe, built.run_schedule, *shown), hooks


def _prepare_folder(context: RunContext) -> None:
    """Warn of a sink size that isn't used; let features act after a resumed run's first step."""
    train = context.recipe.train
    if not train.sink and train.sink_size != -1:
        context.reporter.warn(f"train.sink_size = {train.sink_size}: ignored, sink is false")
    if context.resuming and context.ranks.is_first:
        context.folder.advanced.add(partial(context.features.advance, context))


def _list_monitors(run: CompiledRun, observers: Observers, outlook: Monitor) -> list[Monitor]:
    """Return the monitors of a run in the order of their calls; tell a pruner the run's length."""
    context = run.context
    monitors = [AdvanceMonitor(context.folder.advanced), observers.monitor, outlook]
    pruner = context.options.pruner
    if pruner is not None:
        pruner.on_length(run.built.run_schedule.total)
        monitors.append(pruner)
    return [*monitors, *context.features.monitors]


def _examine(run: CompiledRun, state: TrainState, step: int) -> Examination:
    """Examine a non-finite step that ends the run, by the features of the run."""
    examination = run.context.features.examine(run, state, step)
    return Examination() if examination is None else examination


def _measure(features: Sequence[StepFeature], telemetry: Telemetry, seconds: float) -> Telemetry:
    """Return telemetry with the columns that features measure on the host."""
    for feature in features:
        columns = {**telemetry.columns, **feature.measure(telemetry, seconds)}
        telemetry = Telemetry(telemetry.start, columns)
    return telemetry


def make_early_stop(spec: EarlyStopSpec) -> EarlyStop:
    """Return the early stop of a recipe."""
    if spec.metric is None:
        return EarlyStop()
    direction = list_metric_directions([spec.metric])[spec.metric]
    return EarlyStop(spec.metric, direction, spec.patience, spec.min_delta)


def _make_collector(run: CompiledRun, observers: Observers) -> Callable[[TrainState, int], None]:
    """Return the collector of weights and gradients, or `do_nothing` if nothing is collected."""
    context = run.context
    built = run.built
    if context.recipe.monitor.collect_every is None or not context.shows_pictures:
        return do_nothing
    # Imported here, since few runs need it.
    from pipeline.stages.collect import Collector

    return Collector(
        built.step_config,
        run.executable.loader,
        built.run_schedule.total,
        run.backend.device,
        lambda step, histograms: observers.show(
            lambda board: board.add_histograms(step, histograms)
        ),
        context.reporter.warn,
        compiles=context.recipe.train.mode == "graph",
        collects_gradients=context.ranks.size == 1,
    )


def make_callbacks(context: RunContext) -> Sequence[Callback]:
    """Make the callbacks of the recipe, followed by those from Python.

    Only the first process has callbacks. Raises RecipeError if one can't be made.
    """
    if not context.ranks.is_first:
        return ()
    callbacks: list[Callback] = []
    for position, spec in enumerate(context.recipe.train.callbacks):
        try:
            callbacks.append(_require_callback(spec.build()))
        except Exception as error:
            key = f"train.callbacks.{position} ({spec.name})"
            raise RecipeError(f"{key}: {type(error).__name__}: {first_line(error)}") from error
    for callback in context.options.callbacks:
        try:
            callbacks.append(_require_callback(callback))
        except TypeError as error:
            raise RecipeError(f"callbacks: {error}") from error
    return callbacks


def require_ready_callbacks(recipe: Recipe) -> None:
    """Raise RecipeError if a callback of the training stage can't work in this process."""
    if "train" not in recipe.stages:
        return
    problems = []
    for position, spec in enumerate(recipe.train.callbacks):
        try:
            spec.require_ready()
        except ValueError as error:
            problems.append(f"train.callbacks.{position} ({spec.name}): {error}")
    if problems:
        raise RecipeError(problems)


def _open_callbacks(evaluations: Evaluations, callbacks: Sequence[Callback]) -> NoCallbacks:
    """Open the callbacks of the first process. Other processes have none, and get its requests."""
    context = evaluations.run.context
    if not context.recipe.train.callbacks and not context.options.callbacks:
        return NoCallbacks()
    # A run without a checkpoint begins again, so it isn't resumed.
    resumed = context.resuming and bool(list_saved_steps(context.run_dir / FOLDER))
    view = RunView(
        context.run_dir,
        evaluations.run.built.run_schedule,
        evaluations.evaluate_alone,
        resumed=resumed,
        processes=context.ranks.size,
    )
    monitor = evaluations.observers.monitor
    view.flush = monitor.flush
    return Callbacks(callbacks, view, context.reporter.warn, monitor.on_scalars)


def _require_callback(callback: Any) -> Callback:
    if not isinstance(callback, Callback):
        raise TypeError(f"{show(callback)}: must be an instance of a subclass of Callback")
    return callback


def _open_checkpoints(
    evaluations: Evaluations, save_periods: tuple[int, ...], stack: ExitStack
) -> Checkpoints | NoCheckpoints | None:
    context = evaluations.run.context
    recipe = context.recipe
    if "checkpoint" not in recipe.stages:
        return None
    # Imported here, since a run without the stage doesn't need it.
    from pipeline.checkpoint.checkpointer import Checkpoints, NoCheckpoints, Retention
    from pipeline.stages.record.recorded_recipe import hash_recipe

    if not context.ranks.is_first:
        return NoCheckpoints()
    spec = recipe.checkpoint
    tree = recipe.model_dump(mode="json")
    # Rollbacks need the checkpoints of the schedule.
    periods = save_periods if isinstance(recipe.train.on_nan, Rollback) else ()
    is_needed = partial(is_due, periods=periods)
    retention = Retention(spec.keep, spec.best, is_needed, spec.keep_minutes)
    copies = stack.enter_context(context.features.copy_checkpoints(evaluations))
    select = evaluations.run.built.step_config.select_saved
    digest = hash_recipe(tree)
    checkpoints = Checkpoints(context.run_dir, retention, tree, digest, copies, select)
    stack.enter_context(checkpoints)
    checkpoints.require_space(count_bytes(evaluations.run.built.state))
    return checkpoints


def _make_rollbacks(
    context: RunContext,
    save_periods: tuple[int, ...],
    checkpoints: Checkpoints | NoCheckpoints | None,
) -> NoRollbacks:
    policy = context.recipe.train.on_nan
    if checkpoints is None or not isinstance(policy, Rollback):
        return NoRollbacks()
    from pipeline.checkpoint.restore import read_state

    read = partial(read_state, context.run_dir)
    return Rollbacks(policy.most, save_periods, checkpoints.list_steps, read, context.ranks.agree)


def record_overflows(context: RunContext, state: TrainState) -> None:
    """Record the final loss scale, and the number of updates that were skipped for overflows."""
    part = get_loss_scale_state(state)
    scale = float(part.scale)
    skipped = 0 if part.overflows is None else int(part.overflows.skipped_steps)
    context.summary.loss_scale = {"final": scale, "skipped_steps": skipped}
    if part.overflows is not None:
        context.reporter.print_stage(
            "loss scale", f"{scale:,g} at the end; {skipped:,} updates skipped"
        )


def _record_results(run: CompiledRun, history: History, hooks: Hooks) -> None:
    """Record the results of training in the summary."""
    context = run.context
    unit = run.dataset.unit
    summary = context.summary
    run_schedule = run.built.run_schedule
    summary.status = history.status
    summary.reason = history.reason
    is_cut = isinstance(hooks.deadline, Deadline) and history.step < run_schedule.total
    if history.status == "done" and history.reason is None and is_cut:
        summary.reason = f"the deadline: {history.step:,} of {run_schedule.total:,} steps"
    summary.exit_status = get_exit_status(history.status)
    summary.steps = history.step
    summary.epochs = history.step / run_schedule.steps_per_epoch
    summary.sinks = run_schedule.place(max(1, history.step)).sink
    summary.metrics["train_loss"] = history.loss
    summary.bad_steps = {
        "policy": hooks.on_non_finite_step,
        "left_out": history.left_out,
        "rollbacks": [asdict(rollback) for rollback in hooks.rollbacks.done],
    }
    context.features.record(run, history)
    summary.feed = asdict(run.executable.loader.report())
    started_at = context.options.started_at
    step_ms = history.step_ms
    first_step_at = history.first_step_at
    units_per_step = context.recipe.train.batch_size * unit.per_sample
    summary.time |= {
        "first_dispatch_s": history.first_dispatch_s,
        "first_step_s": None if first_step_at is None else first_step_at - started_at,
        "train_s": history.train_s,
        "step_ms": step_ms,
        "median_step_ms": history.median_step_ms,
        f"{unit.speed_unit}_per_s": 1000 * units_per_step / step_ms if step_ms else None,
        "first_window_s": summary.feed["first_window_ms"] / 1000,
    }
