"""The length of a run and the periods of its events, in steps, computed from its recipe."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pipeline.engine.schedule import Event, RunSchedule, Schedule

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe, TrainSpec

LENGTH_UNITS = ("epochs", "passes", "steps", "minutes", "until")
MAX_STEPS = 100_000_000
UNPLANNED_STEPS = 1 << 20
"""Preliminary number of steps of a run with a deadline. Its programs have room for the learning
rates of these steps; longer runs must be compiled again."""


def schedule_run(train: TrainSpec, steps_per_epoch: int) -> RunSchedule:
    """Return the schedule of a run whose epochs have `steps_per_epoch` steps.

    If `sink_size` is auto, a sink is an epoch until its size is chosen. If `end_step` ends the run
    early, its learning rates still follow the steps of `count_total_steps`.
    """
    sink_steps = _get_sink_steps(train) or steps_per_epoch
    total = train.end_step or count_total_steps(train, steps_per_epoch)
    return RunSchedule(total, steps_per_epoch, sink_steps if train.sink else None)


def _get_sink_steps(train: TrainSpec) -> int | None:
    """Return the recipe's `sink_size` in steps; None for an epoch (-1) and for auto."""
    size = train.sink_size
    return size if isinstance(size, int) and size > 0 else None


def count_total_steps(train: TrainSpec, steps_per_epoch: int) -> int:
    """Return a run's length in steps.

    `epochs` counts sinks if `sink` is true and `sink_size` > 0. Else it counts epochs, also if
    `sink_size` is auto, since a run's length must not depend on a measurement. With a deadline,
    returns `UNPLANNED_STEPS`. Raises ValueError for no length, and for more than `MAX_STEPS` steps.
    """
    sink_steps = _get_sink_steps(train) if train.sink else None
    if train.steps is not None:
        total = train.steps
    elif train.passes is not None:
        total = train.passes * steps_per_epoch
    elif train.epochs is not None:
        total = train.epochs * (sink_steps or steps_per_epoch)
    elif train.deadline is not None:
        total = UNPLANNED_STEPS
    else:
        raise ValueError("one of epochs, passes, steps, minutes and until must be given")
    if total > MAX_STEPS:
        raise ValueError(f"{total} steps in all; must be at most {MAX_STEPS}")
    return total


def list_event_periods(recipe: Recipe, steps_per_epoch: int) -> dict[Event, tuple[int, ...]]:
    """Return the periods, in steps, of evaluations, checkpoints and collections for TensorBoard."""

    def list_periods(steps: int | None, epochs: int | None) -> tuple[int, ...]:
        periods = (steps, None if epochs is None else epochs * steps_per_epoch)
        return tuple(period for period in periods if period)

    evals = list_periods(recipe.eval.every_steps, recipe.eval.every_passes)
    saves = list_periods(recipe.checkpoint.every_steps, recipe.checkpoint.every_passes)
    if recipe.checkpoint.best is not None:
        saves += evals
    if "checkpoint" not in recipe.stages:
        saves = ()
    collect_every = recipe.monitor.collect_every if recipe.monitor.tensorboard else None
    collects = list_periods(collect_every, None)
    return {Event.EVALUATE: evals, Event.CHECKPOINT: saves, Event.COLLECT: collects}


def schedule_events(recipe: Recipe, run: RunSchedule, dump_steps: Collection[int] = ()) -> Schedule:
    """Return the schedule of a run with its events; `dump_steps` are the steps of dumps."""
    periods = list_event_periods(recipe, run.steps_per_epoch)
    return Schedule(run, periods, {Event.DUMP: dump_steps}, recipe.train.dispatch_seconds)


def check_one_length(recipe: Recipe) -> Iterator[str]:
    """Exactly one unit sets the length."""
    lengths = {unit: getattr(recipe.train, unit) for unit in LENGTH_UNITS}
    settings = [f"{unit} = {value}" for unit, value in lengths.items() if value is not None]
    if len(settings) != 1:
        reason = "none is given; add one, as in train.passes=10, or name a recipe: +recipe=NAME"
        if settings:
            reason = f"given are {', '.join(settings)}"
        yield f"train: give exactly one of {', '.join(LENGTH_UNITS)}; {reason}"


def check_deadline(recipe: Recipe) -> Iterator[str]:
    """With a deadline, no key needs the number of steps before the first step."""
    train = recipe.train
    if train.deadline is None or list(check_one_length(recipe)):
        return
    condition = f"with train.{train.deadline}"
    if train.end_step is not None:
        yield f"train.end_step: must be null {condition}"
    tables = [key for key, schedule in train.schedules.items() if schedule.name == "table"]
    if tables:
        yield f"{tables[0]}: must not be a table, which has a rate for each step, {condition}"
    if recipe.eval.samples == "trained":
        yield f"eval.samples = trained: must be all or a number {condition}"
    if recipe.privacy is not None:
        yield f"privacy: must be null, as its noise depends on the steps, {condition}"
    if recipe.profile.mode == "only":
        yield f"profile.mode = only: must be off or on {condition}"
