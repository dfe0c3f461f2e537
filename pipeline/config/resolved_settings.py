"""Settings of a recipe in steps and types: length, periods of events, precision, loss scale.

They are computed from its keys, with `auto` resolved.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

from pipeline.config.recipe import Recipe
from pipeline.engine.callbacks.metric_callbacks import ReduceOnPlateau, StopAt
from pipeline.engine.schedule import Event, RunSchedule, Schedule
from pipeline.models.layers.precision import LEVELS, Level, Precision
from pipeline.training.features.loss_scales import LossScaling

if TYPE_CHECKING:
    from pipeline.config.recipe import TrainSpec
    from pipeline.data.image_facts import ImageFacts

LENGTH_UNITS = ("epochs", "sink_epochs", "steps", "minutes", "until")
MAX_STEPS = 100_000_000
UNPLANNED_STEPS = 1 << 20
"""Preliminary number of steps of a run with a deadline. Its programs have room for the learning
rates of these steps; longer runs must be compiled again."""


def schedule_run(train: TrainSpec, steps_per_epoch: int) -> RunSchedule:
    """Return the schedule of a run whose epochs have `steps_per_epoch` steps.

    If `sink_size` is auto, a sink is an epoch until its size is chosen. If `end_step` ends the run
    early, its learning rates still follow the steps of `count_total_steps`.
    """
    sink_steps = get_sink_steps(train) or steps_per_epoch
    total = train.end_step or count_total_steps(train, steps_per_epoch)
    return RunSchedule(total, steps_per_epoch, sink_steps if train.sink else None)


def get_sink_steps(train: TrainSpec) -> int | None:
    """Return the recipe's `sink_size` in steps; None for an epoch (-1) and for auto."""
    size = train.sink_size
    return size if isinstance(size, int) and size > 0 else None


def _require_sink_steps(train: TrainSpec) -> int:
    """Return the recipe's `sink_size`. Raises ValueError for an epoch (-1) and for auto; numbers
    that no sink can have are refused elsewhere."""
    if train.sink_size in (-1, "auto"):
        raise ValueError(
            f"sink_epochs = {train.sink_epochs}: counts sinks of sink_size steps, and sink_size is "
            f"{train.sink_size}; set it, as in train.sink_size=100, or read the data "
            f"{train.sink_epochs} times with train.epochs={train.sink_epochs}"
        )
    return get_sink_steps(train) or 1


def count_total_steps(train: TrainSpec, steps_per_epoch: int) -> int:
    """Return a run's length in steps.

    `epochs` counts readings of the training split, `sink_epochs` sinks of `sink_size` steps, also
    if `sink` is false: sinks change the speed only. With a deadline, returns `UNPLANNED_STEPS`.
    Raises ValueError for no length, for sink epochs without a size of sinks, and for more than
    `MAX_STEPS` steps.
    """
    if train.steps is not None:
        total = train.steps
    elif train.epochs is not None:
        total = train.epochs * steps_per_epoch
    elif train.sink_epochs is not None:
        total = train.sink_epochs * _require_sink_steps(train)
    elif train.deadline is not None:
        total = UNPLANNED_STEPS
    else:
        raise ValueError("one of epochs, sink_epochs, steps, minutes and until must be given")
    if total > MAX_STEPS:
        raise ValueError(f"{total} steps in all; must be at most {MAX_STEPS}")
    return total


def find_known_facts(recipe: Recipe) -> ImageFacts | None:
    """Return the dataset's sizes if they are known before it is read, else None.

    They are unknown with buckets, which change shapes and batches, and with operations on the host,
    which change samples.
    """
    spec = recipe.dataset
    return None if spec.buckets or spec.is_changed_on_host else spec.facts()


def find_length_problems(train: TrainSpec, steps_per_epoch: int | None) -> Iterator[str]:
    """Yield the problem of a run's length, if any: more than `MAX_STEPS` steps, or an `end_step`
    that isn't one of them. The steps of an epoch may be unknown, None, but are at least one."""
    try:
        total = count_total_steps(train, steps_per_epoch or 1)
    except ValueError as error:
        yield f"train: {error}"
        return
    is_total_known = steps_per_epoch is not None or train.steps is not None
    if train.end_step is not None and train.end_step > total and is_total_known:
        yield f"train.end_step = {train.end_step}: must be at most the {total} steps of training"


def find_warmup_problems(train: TrainSpec, steps_per_epoch: int) -> Iterator[str]:
    """Yield the problems of schedules whose warmup doesn't end before training does. Raises
    ValueError for a wrong length."""
    total = count_total_steps(train, steps_per_epoch)
    for key, schedule in train.schedules.items():
        warmup = schedule.warmup(steps_per_epoch)
        if warmup >= total:
            yield (
                f"{key}: warmup of {warmup} steps must be shorter than the {total} steps of "
                "training"
            )


def find_late_phases(train: TrainSpec, steps_per_epoch: int) -> Iterator[str]:
    """Yield the problems of frozen parameters that no step of the run would train."""
    total = count_total_steps(train, steps_per_epoch)
    for rule in train.unfreeze:
        if (start := rule.start(steps_per_epoch)) >= total:
            yield (
                f"train.unfreeze: {rule.pattern} would be trained after {start:,} steps; the run "
                f"has {total:,}"
            )


def list_event_periods(recipe: Recipe, steps_per_epoch: int) -> dict[Event, tuple[int, ...]]:
    """Return the periods, in steps, of evaluations, checkpoints and collections for TensorBoard."""

    def list_periods(steps: int | None, epochs: int | None) -> tuple[int, ...]:
        periods = (steps, None if epochs is None else epochs * steps_per_epoch)
        return tuple(period for period in periods if period)

    evals = list_periods(recipe.eval.every_steps, recipe.eval.every_epochs)
    saves = list_periods(recipe.checkpoint.every_steps, recipe.checkpoint.every_epochs)
    if recipe.checkpoint.best is not None:
        saves += evals
    if "checkpoint" not in recipe.stages:
        saves = ()
    collect_every = recipe.monitor.collect_every if recipe.monitor.tensorboard else None
    collects = list_periods(collect_every, None)
    return {Event.EVALUATE: evals, Event.CHECKPOINT: saves, Event.COLLECT: collects}


def schedule_events(
    recipe: Recipe,
    run: RunSchedule,
    state_steps: Collection[int] = (),
    state_periods: Sequence[int] = (),
) -> Schedule:
    """Return the schedule of a run with its events. Features of the run see the state after the
    `state_steps`, and at the multiples of the `state_periods`."""
    periods = {
        **list_event_periods(recipe, run.steps_per_epoch),
        Event.DUMP: tuple(state_periods),
    }
    return Schedule(run, periods, {Event.DUMP: state_steps}, recipe.train.dispatch_seconds)


def check_one_length(recipe: Recipe) -> Iterator[str]:
    """Exactly one unit sets the length, and sinks that are counted have a size."""
    lengths = {unit: getattr(recipe.train, unit) for unit in LENGTH_UNITS}
    settings = [f"{unit} = {value}" for unit, value in lengths.items() if value is not None]
    if len(settings) != 1:
        reason = "none is given; add one, as in train.epochs=10, or name a recipe: +recipe=NAME"
        if settings:
            reason = f"given are {', '.join(settings)}"
        yield f"train: give exactly one of {', '.join(LENGTH_UNITS)}; {reason}"
    elif recipe.train.sink_epochs is not None:
        try:
            _require_sink_steps(recipe.train)
        except ValueError as error:
            yield f"train.{error}"


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


def resolve_level(recipe: Recipe) -> Level:
    """Return the precision level of a recipe; auto is resolved by the device."""
    level = recipe.train.precision
    return recipe.device.auto_precision if level == "auto" else level


def resolve_precision(recipe: Recipe) -> Precision:
    """Return the dtypes that the layers compute in: the level's, then `to_float`'s."""
    level = LEVELS[resolve_level(recipe)]
    if recipe.train.keep_batchnorm_fp32 is not None:
        level = level.with_batch_norm(in_float32=recipe.train.keep_batchnorm_fp32)
    return replace(level, rules=(*level.rules, *recipe.train.to_float))


def resolve_loss_scale(recipe: Recipe) -> LossScaling:
    """Return the loss scale of a recipe; auto is resolved by the level."""
    return recipe.train.loss_scale.resolve(resolve_level(recipe))


def list_deciding_metrics(recipe: Recipe) -> dict[str, str | None]:
    """Return the metric of each key that selects checkpoints or changes the run; None if unset."""
    return {
        "checkpoint.best": recipe.checkpoint.best,
        "monitor.early_stop.metric": recipe.monitor.early_stop.metric,
        **{
            f"train.callbacks.{position}.metric": callback.metric
            for position, callback in enumerate(recipe.train.callbacks)
            if isinstance(callback, ReduceOnPlateau | StopAt)
        },
    }
