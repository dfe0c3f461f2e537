"""The length of a run in steps, and the periods of its events, as a recipe sets them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from typing import TYPE_CHECKING

from pipeline.engine.schedule import Event, RunSchedule, Schedule

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe, TrainSpec

LENGTH_UNITS = ("epochs", "passes", "steps", "minutes", "until")
MAX_STEPS = 100_000_000
UNPLANNED_STEPS = 1 << 20
"""Length of a run with a deadline until its steps are chosen. Programs hold a learning rate for
each of these steps, and must be compiled again for more."""


def schedule_run(train: TrainSpec, steps_per_epoch: int) -> RunSchedule:
    """Return the schedule of a run over a dataset of `steps_per_epoch` steps an epoch.

    If `sink_size` is auto, a sink is an epoch until its size is chosen. If `end_step` ends the run
    early, its learning rates still follow the steps of `count_total_steps`.
    """
    size = _get_sink_batches(train) or steps_per_epoch
    total = train.end_step or count_total_steps(train, steps_per_epoch)
    return RunSchedule(total, steps_per_epoch, size if train.sink else None)


def _get_sink_batches(train: TrainSpec) -> int | None:
    """Return the recipe's sink size in batches; None for an epoch (-1) and for auto."""
    size = train.sink_size
    return size if isinstance(size, int) and size > 0 else None


def count_total_steps(train: TrainSpec, steps_per_epoch: int) -> int:
    """Return a run's length in steps; a sink epoch is a sink if `sink_size` > 0, else an epoch.

    If `sink` is false or `sink_size` is auto, a sink epoch is an epoch too: a run's length must not
    depend on a measurement. A deadline is `UNPLANNED_STEPS`, since its steps aren't chosen yet.
    Raises ValueError for no length, and for more than `MAX_STEPS` steps.
    """
    sink_steps = _get_sink_batches(train) if train.sink else None
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

    def to_steps(steps: int | None, epochs: int | None) -> tuple[int, ...]:
        return tuple(period for period in (steps, epochs and epochs * steps_per_epoch) if period)

    evals = to_steps(recipe.eval.every_steps, recipe.eval.every_passes)
    saves = to_steps(recipe.checkpoint.every_steps, recipe.checkpoint.every_passes)
    if recipe.checkpoint.best is not None:
        saves += evals
    if "checkpoint" not in recipe.stages:
        saves = ()
    collects = to_steps(recipe.monitor.collect_every if recipe.monitor.tensorboard else None, None)
    return {Event.EVALUATE: evals, Event.CHECKPOINT: saves, Event.COLLECT: collects}


def schedule_events(recipe: Recipe, run: RunSchedule, dump_at: Collection[int] = ()) -> Schedule:
    """Return the schedule of a run with its events; dumps are at the steps `dump_at`."""
    periods = list_event_periods(recipe, run.steps_per_epoch)
    return Schedule(run, periods, {Event.DUMP: dump_at}, recipe.train.dispatch_seconds)


def check_one_length(recipe: Recipe) -> Iterator[str]:
    """Exactly one unit sets the length."""
    lengths = {unit: getattr(recipe.train, unit) for unit in LENGTH_UNITS}
    settings = [f"{unit} = {value}" for unit, value in lengths.items() if value is not None]
    if len(settings) != 1:
        missing = "none is given; add one, as in train.passes=10, or name a recipe: +recipe=NAME"
        state = f"given are {', '.join(settings)}" if settings else missing
        yield f"train: give exactly one of {', '.join(LENGTH_UNITS)}; {state}"


def check_deadline(recipe: Recipe) -> Iterator[str]:
    """With a deadline, no key needs the number of steps before the first step."""
    train = recipe.train
    if train.deadline is None or list(check_one_length(recipe)):
        return
    tables = (key for key, schedule in train.schedules.items() if schedule.name == "table")
    table = next(tables, None)
    for is_refused, key, rule in (
        (train.end_step is not None, "train.end_step", "must be null"),
        (table is not None, table, "must not be a table, which has a rate for each step,"),
        (recipe.eval.samples == "trained", "eval.samples = trained", "must be all or a number"),
        (recipe.privacy is not None, "privacy", "must be null, as its noise depends on the steps,"),
        (recipe.profile.mode == "only", "profile.mode = only", "must be off or on"),
    ):
        if is_refused:
            yield f"{key}: {rule} with train.{train.deadline}"
