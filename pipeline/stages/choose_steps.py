"""The number of steps of a run with a deadline, chosen by its measured pace before it trains.

The number is written into the recipe of the run; a run with that `train.steps` computes the same.
If learning rates depend on the number, it is fixed before the first step. Otherwise it follows the
pace of training.
"""

from __future__ import annotations

import tempfile
import time
from contextlib import closing
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import numpy as np

from pipeline.checkpoint.checkpointer import Checkpoints, Retention
from pipeline.config.deadline import find_deadline
from pipeline.config.recipe import Recipe, TrainSpec
from pipeline.config.resolved_settings import MAX_STEPS, UNPLANNED_STEPS, schedule_events
from pipeline.core.errors import RecipeError
from pipeline.engine.hooks import Deadline, MovableEnd, find_last_step, refuse_evaluation
from pipeline.engine.schedule import Event
from pipeline.stages.autosink.dispatch_costs import Evaluate, TimedRuns, Variant, time_evaluation
from pipeline.stages.autosink.sink_plan import SinkPlan
from pipeline.stages.build import make_learning_rates
from pipeline.stages.evaluate import EvalOptions, evaluate
from pipeline.stages.record.recorded_recipe import read_recorded_recipe, write_recipe
from pipeline.stages.runner.context import BuiltRun, CompiledRun, OpenPrograms, RunContext
from pipeline.stages.runner.programs import lower_and_compile
from pipeline.stages.runner.resumed_run import keep_length
from pipeline.stages.runner.run_feature import RunFeature

MARGIN_SHARE = 0.01
"""Share of the time that is left free, for steps that are slower than measured."""
LATE_SHARE = 0.02
"""Share of the time by which a run may be late before its steps are cut."""
TIMED_SHARE = 0.03
"""Share of the time for measuring steps, within `LEAST_TIMED_S` and `MOST_TIMED_S`."""
LEAST_TIMED_S = 1.5
MOST_TIMED_S = 10.0
SHORT_ROUNDS = 8
"""Short rounds of steps that fit into the time for measuring."""
ROUND_RATIO = SHORT_ROUNDS // 2
"""Steps of a long round, as a multiple of a short round's steps."""
MOST_EVALUATIONS = 20
"""Most evaluations that are timed between steps."""
CLOSING_S = 0.15
"""Seconds for logs, pictures and the summary, from the last evaluation to the process's end, on an
idle machine."""
FEW_STEPS = 10
"""Number of steps below which a line warns that the run trains next to nothing."""
MAX_SLOWDOWN = 4.0
"""Largest factor by which other work is assumed to slow down the end of a run."""


@dataclass(frozen=True)
class Pace:
    """Times of a run, in seconds."""

    step_s: float
    evaluation_s: float
    save_s: float
    closing_s: float
    """From the last evaluation and checkpoint to the end of the process."""

    def __str__(self) -> str:
        return (
            f"{1000 * self.step_s:,.4g} ms a step, {self.evaluation_s:,.2g} s an evaluation, "
            f"{self.save_s:,.2g} s a checkpoint"
        )


def freeze_steps(
    run: CompiledRun, sink: SinkPlan, end_at: float, open_programs: OpenPrograms
) -> CompiledRun:
    """Return the run with the number of steps that end by `end_at`, and write its recipe.

    `end_at` is a time by `time.perf_counter`. Programs are compiled again only for more than
    `UNPLANNED_STEPS` steps. Raises RecipeError if the time is too short for a step.
    """
    context = run.context
    train = context.recipe.train
    budget_s = end_at - context.options.started_at
    started_at = time.perf_counter()
    with context.reporter.clock("measuring the pace"):
        pace = measure_pace(run, sink, end_at)
    stop_at = end_at - pace.evaluation_s - pace.save_s - pace.closing_s
    events = {Event.EVALUATE: pace.evaluation_s, Event.CHECKPOINT: pace.save_s}
    schedule = schedule_events(context.recipe, replace(run.built.run_schedule, total=MAX_STEPS))
    left_s = stop_at - MARGIN_SHARE * budget_s - time.perf_counter()
    # Checkpoints by time take a share of the time of every step.
    slowdown = 1 + pace.save_s / context.recipe.checkpoint.save_seconds
    steps = find_last_step(schedule, 0, left_s, slowdown * pace.step_s, events)
    if train.iterations_per_loop is not None:
        steps -= steps % train.iterations_per_loop
    if steps < 1:
        raise _too_short(train, budget_s - left_s + pace.step_s * (train.iterations_per_loop or 1))
    update = {"minutes": None, "until": None, "steps": steps, "planned_for": train.deadline}
    recipe = context.recipe.model_copy(update={"train": train.model_copy(update=update)})
    _write_recipe(context, recipe)
    measured_s = time.perf_counter() - started_at
    context.reporter.print_stage(
        "deadline",
        f"{steps:,} steps for {train.deadline}: {pace}; {measured_s:.1f} s to measure this",
    )
    if steps < FEW_STEPS:
        context.reporter.print_stage("deadline", explain_few_steps(steps, pace))
    deadline: Deadline | MovableEnd = Deadline(
        stop_at + LATE_SHARE * budget_s, events, _EarlyEnd(context, recipe)
    )
    if _is_movable(run, recipe, steps):
        write_steps = partial(_write_steps, context, recipe)
        deadline = MovableEnd(stop_at, events, write_steps, UNPLANNED_STEPS)
    return _set_steps(run, replace(context, recipe=recipe, deadline=deadline), open_programs)


def explain_few_steps(steps: int, pace: Pace) -> str:
    """Return the warning of a deadline that leaves so few steps."""
    minutes = FEW_STEPS * pace.step_s / 60
    return (
        f"{steps:,} steps train next to nothing; {FEW_STEPS} take {minutes:.2g} minutes more than "
        "the start and the evaluation; a smaller train.batch_size has more steps"
    )


def _is_movable(run: CompiledRun, recipe: Recipe, steps: int) -> bool:
    """Return whether the first steps of a run are the same however many steps follow.

    Callbacks, pruners, profiles, dumps and histograms need the number of steps. Raises RecipeError
    if a schedule needs more steps.
    """
    options = run.context.options
    train = recipe.train
    if train.callbacks or options.callbacks or options.pruner or recipe.profile.mode != "off":
        return False
    if train.iterations_per_loop is not None or steps > UNPLANNED_STEPS:
        return False
    if recipe.dump.steps is not None or recipe.monitor.collect_every is not None:
        return False
    schedule = run.built.run_schedule
    make_learning_rates(train, replace(schedule, total=steps))
    try:
        # `steps` may end in a warmup, during which the rates of all lengths are equal.
        rates = make_learning_rates(train, replace(schedule, total=UNPLANNED_STEPS // 2))
    except RecipeError:  # a warmup of more steps
        return False
    return np.array_equal(rates, run.built.learning_rates[: len(rates)])


def _too_short(train: TrainSpec, required_s: float) -> RecipeError:
    """Return the error of a deadline before the first step, which needs `required_s` seconds."""
    problem = f"must leave time for a step; it takes at least {required_s / 60:,.3g} minutes here"
    return RecipeError(f"train.{train.deadline}: {problem}")


def measure_pace(run: CompiledRun, sink: SinkPlan, end_at: float) -> Pace:
    """Time steps, a part of an evaluation, and a checkpoint.

    Learning rates are 0 meanwhile, so that no step diverges. Takes about `TIMED_SHARE` of the time
    of the run, which ends at `end_at` by `time.perf_counter`. Raises RecipeError if a step can't
    end by then, RunError if a step isn't finite.
    """
    recipe = run.context.recipe
    run_started_at = run.context.options.started_at
    budget_s = end_at - run_started_at
    executable = run.executable
    executable.set_learning_rates(np.zeros_like(run.built.learning_rates))
    started_at = time.perf_counter()
    process_started_s = time.process_time()
    timed_s = float(np.clip(TIMED_SHARE * budget_s, LEAST_TIMED_S, MOST_TIMED_S))
    evaluation_s = compile_s = 0.0
    is_terminal = run.context.reporter.console.is_terminal
    with (
        closing(executable.loader),
        TimedRuns(recipe, run.built.run_schedule, executable, is_terminal=is_terminal) as trials,
    ):
        step_s = time_steps(trials, sink, timed_s)
        first_end_at = time.perf_counter() + step_s
        if first_end_at > end_at:
            raise _too_short(recipe.train, first_end_at - run_started_at)
        if "eval" in recipe.stages:
            began_at = time.perf_counter()
            executable.evaluate(trials.state, 0, 1)
            compile_s = time.perf_counter() - began_at
            evaluation_s = _time_whole_evaluation(run, sink, trials, step_s, timed_s)
        save_s = _time_save(run, trials, timed_s) if "checkpoint" in recipe.stages else 0.0
    executable.set_learning_rates(run.built.learning_rates)
    # The program that predicts samples at the end takes about as long to compile as evaluation.
    predicts = recipe.monitor.tensorboard and recipe.monitor.sample_predictions > 0
    # Other work on the machine slows down the end of the run as it slowed down this measurement.
    # Waiting for a GPU or for loaders isn't other work, so the factor has a limit.
    slowdown = (time.perf_counter() - started_at) / (time.process_time() - process_started_s)
    closing_s = CLOSING_S * min(max(1.0, slowdown), MAX_SLOWDOWN)
    closing_s += compile_s if predicts else 0.0
    return Pace(step_s, evaluation_s, save_s, closing_s)


def time_steps(trials: TimedRuns, sink: SinkPlan, timed_s: float) -> float:
    """Time steps in the run's sinks for about `timed_s` seconds; return the seconds of a step.

    The result is the difference in time of a long and a short round, divided by their difference in
    steps. A round ends when its logs are written: if writing a log takes longer than a step, a long
    run waits for it. Earlier rounds don't enter the result, since a new process is slower.
    """

    def time_round(steps: int, sink_steps: int) -> float:
        began_at = time.perf_counter()
        trials.time(Variant(None if sink.size is None else sink_steps, sink.mechanism), steps)
        return time.perf_counter() - began_at

    started_at = time.perf_counter()
    single = Variant(None if sink.size is None else 1, sink.mechanism)
    step_s = trials.time(single, 2).step_ms / 1e3
    if time.perf_counter() - started_at > timed_s:
        # Two such steps have taken all the time. The second one counts.
        return step_s
    while True:
        if SHORT_ROUNDS * step_s > timed_s:
            # Compared with such a long step, logs and starts take no time.
            return trials.time(single, max(2, int(timed_s / step_s))).step_ms / 1e3
        steps = max(4, int(timed_s / SHORT_ROUNDS / step_s))
        if time.perf_counter() - started_at > timed_s / 2:
            break
        step_s = time_round(steps, 1) / steps
    long_steps = ROUND_RATIO * steps
    # With long sinks, each round is at most one sink, so that no sink ends within it.
    sink_steps = min(sink.size or 1, long_steps)
    time_round(steps, sink_steps)
    short_s = time_round(steps, sink_steps)
    long_s = time_round(long_steps, sink_steps)
    step_s = (long_s - short_s) / (long_steps - steps)
    # If other work slowed down the short round alone, the difference is too small. Half the mean
    # time of the long round is a lower bound.
    return max(step_s, long_s / long_steps / 2)


def _time_whole_evaluation(
    run: CompiledRun, sink: SinkPlan, trials: TimedRuns, step_s: float, timed_s: float
) -> float:
    """Return the seconds of an evaluation, timed on a part of it.

    Short evaluations are timed between steps too: they are slower, since a thread writes logs.
    """
    recipe = run.context.recipe
    batches = run.dataset.eval_order.steps_per_epoch
    evaluation_s = time_evaluation(run.executable, trials.state, batches)
    evaluation_s *= 2 if recipe.eval.on_train else 1
    count = min(int(timed_s / 4 / evaluation_s), MOST_EVALUATIONS)
    # With a step between two evaluations, a round must not take longer than a short one of steps.
    if count < 3 or SHORT_ROUNDS * step_s * count > timed_s:
        return evaluation_s
    metrics = run.built.step_config.metrics
    options = EvalOptions(recipe.train.dispatch_seconds, metrics, on_train=recipe.eval.on_train)
    # All sinks together take a short round.
    sink_steps = int(timed_s / SHORT_ROUNDS / step_s / count)

    def time_round(evaluate_state: Evaluate) -> float:
        began_at = time.perf_counter()
        trials.time(Variant(sink_steps, sink.mechanism), sink_steps * count, evaluate_state)
        return time.perf_counter() - began_at

    time_round(refuse_evaluation)  # opens the logs
    steps_s = time_round(refuse_evaluation)
    both_s = time_round(lambda state: evaluate(run.executable, state, run.dataset, options))
    return max(evaluation_s, (both_s - steps_s) / count)


def _time_save(run: CompiledRun, trials: TimedRuns, timed_s: float) -> float:
    """Return the seconds of a checkpoint, the second one written: the first imports modules.

    If the first one takes more than `timed_s`, its time counts.
    """
    tree = run.context.recipe.model_dump(mode="json")
    with (
        tempfile.TemporaryDirectory() as folder,
        Checkpoints(Path(folder), Retention(keep=1), tree) as writer,
    ):
        for step in (1, 2):
            started_at = time.perf_counter()
            writer.save(step, trials.state, {}, None)
            writer.finish()
            seconds = time.perf_counter() - started_at
            if seconds > timed_s:
                break
    return seconds


def _write_steps(context: RunContext, recipe: Recipe, steps: int) -> None:
    """Write the run's recipe with a new number of steps.

    Fewer steps become `end_step`: `train.steps` stays, since it must be more than a warmup's steps.
    """
    assert recipe.train.steps is not None
    is_early = steps < recipe.train.steps
    update = {"end_step": steps} if is_early else {"steps": steps}
    train = recipe.train.model_copy(update=update)
    _write_recipe(context, recipe.model_copy(update={"train": train}))


@dataclass
class _EarlyEnd:
    """Writes the step after which a late run ends into its recipe, and prints the first one."""

    context: RunContext
    recipe: Recipe
    is_printed: bool = False

    def __call__(self, end: int) -> None:
        """Write `end`, a step. Each is earlier than the one before."""
        _write_steps(self.context, self.recipe, end)
        if not self.is_printed:
            line = f"steps are slower than measured: training ends by step {end:,}"
            self.context.reporter.print_stage("deadline", f"{line} of {self.recipe.train.steps:,}")
            self.is_printed = True


def _write_recipe(context: RunContext, recipe: Recipe) -> None:
    context.folder.advanced.add(partial(write_recipe, context.run_dir, recipe))


def _set_steps(run: CompiledRun, context: RunContext, open_programs: OpenPrograms) -> CompiledRun:
    """Return the run with the steps of the recipe in `context`, and their learning rates."""
    train = context.recipe.train
    built = run.built
    schedule = replace(built.run_schedule, total=train.steps or 0)
    if not isinstance(context.deadline, Deadline):
        return replace(run, context=context, built=replace(built, run_schedule=schedule))
    rates = make_learning_rates(train, schedule)
    # The program was compiled for this number of rates. It doesn't read those after the last step.
    padding = [(0, 0)] * rates.ndim
    padding[0] = (0, max(0, UNPLANNED_STEPS - len(rates)))
    rates = np.pad(rates, padding, mode="edge")
    built = replace(built, run_schedule=schedule, learning_rates=rates)
    if schedule.total > UNPLANNED_STEPS:
        return open_programs(BuiltRun(context, context.recipe, run.dataset, built, run.backend))
    run.executable.set_learning_rates(rates)
    return replace(run, context=context, built=built)


class DeadlineSteps(RunFeature):
    """The number of steps of a run with `train.minutes` or `train.until`."""

    _end_at: float | None = None
    """Deadline of the command by `time.perf_counter`; None for a resumed run, which has its number
    of steps already."""

    def resume(self, recipe: Recipe, run_dir: Path) -> Recipe:
        """Return the recipe with the number of steps that the run to resume has chosen."""
        return keep_length(recipe, read_recorded_recipe(run_dir), run_dir)

    def begin(self, context: RunContext) -> None:
        """Find the deadline. Raises RecipeError if it is past."""
        self._end_at = find_deadline(context.recipe.train, context.options.started_at)

    def prepare(self, run: CompiledRun, sink: SinkPlan, step: int) -> CompiledRun:
        """Choose the number of steps."""
        if self._end_at is None:
            return run
        open_programs = run.context.options.programs or lower_and_compile
        return freeze_steps(run, sink, self._end_at, open_programs)
