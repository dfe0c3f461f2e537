"""The length of a run in steps, and the periods of its events, as a recipe sets them."""

from __future__ import annotations

from collections.abc import Collection
from typing import TYPE_CHECKING

from pipeline.engine.schedule import Event, RunSchedule, Schedule

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe, TrainSpec

MAX_STEPS = 100_000_000


def schedule_run(train: TrainSpec, steps_per_pass: int) -> RunSchedule:
    """Return the schedule of a run over a dataset of `steps_per_pass` steps a pass.

    With a `sink_size` of auto a sink is a pass until its size is chosen.
    """
    size = _batches_of_sink(train) or steps_per_pass
    return RunSchedule(
        total_steps(train, steps_per_pass), steps_per_pass, size if train.sink else None
    )


def _batches_of_sink(train: TrainSpec) -> int | None:
    """Return the size that the recipe gives in batches; None for a pass (-1) and where it is
    chosen later (auto)."""
    size = train.sink_size
    return size if isinstance(size, int) and size > 0 else None


def total_steps(train: TrainSpec, steps_per_pass: int) -> int:
    """Return a run's length in steps; an epoch is a sink if `sink_size` > 0, else a pass (S-06).

    With `sink: false` the sink size is ignored, so an epoch is a pass then too (S-07). So it is
    with auto, since the length of a run must not depend on a measurement. Raises ValueError when no
    length is given, or one of more than `MAX_STEPS` steps.
    """
    sink_steps = _batches_of_sink(train) if train.sink else None
    if train.steps is not None:
        total = train.steps
    elif train.passes is not None:
        total = train.passes * steps_per_pass
    elif train.epochs is not None:
        total = train.epochs * (sink_steps or steps_per_pass)
    else:
        raise ValueError("one of epochs, passes and steps must be given")
    if total > MAX_STEPS:
        raise ValueError(f"{total} steps in all; must be at most {MAX_STEPS}")
    return total


def event_periods(recipe: Recipe, per_pass: int) -> dict[Event, tuple[int, ...]]:
    """Return the periods, in steps, of evaluations, checkpoints and collections for TensorBoard;
    `per_pass` steps a pass."""
    evals = _in_steps(recipe.eval.every_steps, recipe.eval.every_passes, per_pass)
    saves = _in_steps(recipe.checkpoint.every_steps, recipe.checkpoint.every_passes, per_pass)
    if recipe.checkpoint.best is not None:
        saves += evals
    monitor = recipe.monitor
    collected = monitor.collect_every if monitor.tensorboard else None
    collects = () if collected is None else (collected,)
    return {Event.EVALUATE: evals, Event.CHECKPOINT: saves, Event.COLLECT: collects}


def schedule_events(recipe: Recipe, run: RunSchedule, dump_at: Collection[int] = ()) -> Schedule:
    """Return a run with its events; without the checkpoint stage nothing is cut for a save."""
    every = event_periods(recipe, run.steps_per_pass)
    if "checkpoint" not in recipe.stages:
        every[Event.CHECKPOINT] = ()
    return Schedule(run, every, {Event.DUMP: dump_at}, recipe.train.dispatch_seconds)


def _in_steps(steps: int | None, passes: int | None, per_pass: int) -> tuple[int, ...]:
    return tuple(n for n in (steps, passes and passes * per_pass) if n)
