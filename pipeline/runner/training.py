"""The training of a run: put together as its recipe says, and what it leaves in the summary."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import ExitStack
from dataclasses import asdict
from functools import partial
from typing import Any

from pipeline.autopsy.archive import set_aside_autopsy
from pipeline.errors import exit_status_of
from pipeline.observe.monitors import Evaluation
from pipeline.observe.observers import Observers
from pipeline.runner.context import CompiledRun, RunContext
from pipeline.sink.schedule import Event
from pipeline.stages.checkpoint.checkpointer import Checkpoints
from pipeline.stages.checkpoint.host_state import HostState
from pipeline.stages.evaluate import evaluate
from pipeline.stages.train.event_periods import event_periods
from pipeline.stages.train.history import History
from pipeline.stages.train.loop import Training, train
from pipeline.stages.train.rollback import Rollbacks
from pipeline.training.bad_steps import Rollback
from pipeline.training.state import TrainState


def train_run(
    job: RunContext,
    made: CompiledRun,
    observers: Observers,
    state: TrainState,
    host: HostState,
    history: History,
) -> TrainState:
    """Train, saving at every event that the recipe names, and at the end."""
    _warn_of_ignored_sink(job)
    if job.resuming:
        _set_autopsy_aside(job)
    # What is being written when training ends is on disk before a first signal is answered.
    with job.signals.held(), ExitStack() as stack:
        training = _training(job, made, observers, stack)
        stack.callback(made.executable.feed.close)
        stack.callback(_take_note, job, history, training)
        state = train(training, state, host, history)
    _take_note_of_overflows(job, state)
    return state


def evaluate_run(job: RunContext, made: CompiledRun, state: TrainState) -> Evaluation:
    """Evaluate where a signal interrupts: nothing would be lost."""
    evaluation = evaluate(made.executable, state, made.dataset, job.recipe.train.dispatch_seconds)
    assert evaluation is not None, "nobody gives it up"
    return evaluation


def _warn_of_ignored_sink(job: RunContext) -> None:
    train = job.recipe.train
    if not train.sink and train.sink_size != -1:
        job.reporter.warn(f"train.sink_size = {train.sink_size}: ignored, sink is false")


def _set_autopsy_aside(job: RunContext) -> None:
    folder = set_aside_autopsy(job.run_dir)
    if folder is not None:
        job.reporter.stage("autopsy", f"that of the run before is in {folder}")


def _training(
    job: RunContext, made: CompiledRun, observers: Observers, stack: ExitStack
) -> Training:
    """What training is done with; its checkpoints are closed by `stack`."""
    assert made.sink is not None, "settled before training"
    checkpoints = _open_checkpoints(job, made, stack)
    return Training(
        job.recipe,
        made.built.run_schedule,
        made.executable,
        made.sink.mechanism,
        [observers.monitor, *([job.pruner] if job.pruner else [])],
        partial(_evaluate_unless_stopped, job, made),
        checkpoints,
        made.sink.kept,
        job.signals,
        pruner=job.pruner,
        rollbacks=None if checkpoints is None else _rollbacks(job, made, checkpoints),
        examine=_examination(job, made),
        log_marks=observers.log_marks,
    )


def _open_checkpoints(job: RunContext, made: CompiledRun, stack: ExitStack) -> Checkpoints | None:
    recipe = job.recipe
    if "checkpoint" not in recipe.stages:
        return None
    held = _save_periods(job, made) if isinstance(recipe.train.on_nan, Rollback) else ()
    tree = recipe.model_dump(mode="json")
    return stack.enter_context(Checkpoints(job.run_dir, recipe.checkpoint, tree, held))


def _rollbacks(job: RunContext, made: CompiledRun, checkpoints: Checkpoints) -> Rollbacks | None:
    policy = job.recipe.train.on_nan
    if not isinstance(policy, Rollback):
        return None
    periods = _save_periods(job, made)
    return Rollbacks(policy, periods, checkpoints.steps, checkpoints.read)


def _save_periods(job: RunContext, made: CompiledRun) -> tuple[int, ...]:
    return event_periods(job.recipe, made.built.run_schedule.steps_per_pass)[Event.CHECKPOINT]


def _evaluate_unless_stopped(
    job: RunContext, made: CompiledRun, state: TrainState
) -> Evaluation | None:
    """Evaluate between steps; None where a signal to stop came before or meanwhile."""

    def is_given_up() -> bool:
        return job.signals.stop is not None

    dispatch_s = job.recipe.train.dispatch_seconds
    return evaluate(made.executable, state, made.dataset, dispatch_s, is_given_up)


def _examination(job: RunContext, made: CompiledRun) -> Callable[[TrainState, int], None]:
    """What looks into a step that ends the run."""

    def examine(state: TrainState, bad: int) -> None:
        # Few runs need it, and all would wait for it to be imported.
        from pipeline.autopsy.on_failure import Examination

        parts, device = made.built.parts, made.backend.device
        Examination(job.run_dir, parts, made.executable, device, job.reporter)(state, bad)

    return examine


def _take_note_of_overflows(job: RunContext, state: TrainState) -> None:
    """The loss scale that training ended with, and the updates that it skipped."""
    scale = float(state.loss_scale)
    skipped = 0 if state.overflows is None else int(state.overflows.skipped_steps)
    job.summary.loss_scale = {"final": scale, "skipped_steps": skipped}
    if state.overflows is not None:
        job.reporter.stage("loss scale", f"{scale:,g} at the end; {skipped:,} updates skipped")


def _take_note(job: RunContext, history: History, training: Training) -> None:
    """What training leaves in the summary."""
    summary, run_schedule = job.summary, training.run_schedule
    summary.status, summary.reason = history.status, history.reason
    summary.exit_status = exit_status_of(history.status)
    summary.steps = history.step
    summary.passes = history.step / run_schedule.steps_per_pass
    summary.sinks = run_schedule.place(max(1, history.step)).sink
    summary.metrics["train_loss"] = history.loss
    summary.bad_steps = _bad_steps(history, training)
    summary.feed = asdict(training.executable.feed.report())
    summary.time |= _times(job, history)


def _bad_steps(history: History, training: Training) -> dict[str, Any]:
    rollbacks = training.rollbacks.done if training.rollbacks is not None else []
    return {
        "policy": training.recipe.train.on_nan.name,
        "left_out": history.left_out,
        "rollbacks": [asdict(gone) for gone in rollbacks],
    }


def _times(job: RunContext, history: History) -> dict[str, float | None]:
    step_ms, first_step_at = history.step_ms, history.first_step_at
    return {
        "first_dispatch_s": history.first_dispatch_s,
        "first_step_s": None if first_step_at is None else first_step_at - job.begun,
        "train_s": history.train_s,
        "step_ms": step_ms,
        "images_per_s": 1000 * job.recipe.train.batch_size / step_ms if step_ms else None,
    }
