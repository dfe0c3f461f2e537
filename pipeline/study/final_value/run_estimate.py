"""The run feature `estimate`: where a run will end, in its time line and for the page of runs."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal

import numpy as np
from pydantic import Field

from pipeline.config.recipe import RunFeatureSpec
from pipeline.config.resolved_settings import list_event_periods
from pipeline.core.errors import DataError, RecipeError
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import count_noun
from pipeline.core.registry import component
from pipeline.engine.callbacks.callback import Evaluation, Monitor
from pipeline.engine.monitors.log_lines import EVALS, METRICS, finite_number, read_lines
from pipeline.engine.monitors.observers import BestEffortMonitor
from pipeline.engine.schedule import Event
from pipeline.stages.record.member_runs import find_jobs
from pipeline.stages.record.run_directory import ESTIMATE, OUTPUTS
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.study.final_value.learning_curves import (
    MAX_OWN_CURVES,
    MIN_POINTS,
    FinalError,
    LearningCurve,
    Scale,
    choose_scale,
    extrapolate,
    find_highest_chance,
    list_recipe_runs,
    read_own_curves,
    read_shipped_curves,
    thin,
    to_errors,
    to_values,
)
from pipeline.study.runs.ranking import TRAIN_LOSS, directions, main_metric

if TYPE_CHECKING:
    from pipeline.config.recipe import Recipe
    from pipeline.core.reporter import Reporter
    from pipeline.engine.history import History
    from pipeline.stages.runner.context import CompiledRun
    from pipeline.training.telemetry import Telemetry

MIN_EVALUATIONS = 8
"""Fewest evaluations during training whose metric is watched by default."""
ENOUGH_CURVES = 3
"""Number of the user's curves from which on an interval has no remark."""
LOW, HIGH = 0.1, 0.9
"""Quantiles of the interval."""


@dataclass(frozen=True)
class FinalValue:
    """An estimate of a metric at a run's end: the median and an 80 % interval."""

    step: int
    metric: str
    low: float
    middle: float
    high: float
    num_curves: int
    """Number of done runs that it is from, besides the shipped curves."""
    best: float | None = None
    """Best value of the sweep so far."""
    chance: float | None = None
    """Chance that the run will be better than `best`."""

    def __str__(self) -> str:
        text = (
            f"{self.metric} {self.middle:.4g} at the end (80 %: {self.low:.4g} to {self.high:.4g}"
        )
        if self.num_curves < ENOUGH_CURVES:
            done = count_noun(self.num_curves, "done run")
            text += f"; from shipped curves and {done} of the recipe, fewer than {ENOUGH_CURVES}"
        text += ")"
        if self.best is not None and self.chance is not None:
            text += f"; better than the sweep's best, {self.best:.4g}: {format_chance(self.chance)}"
        return text


def format_chance(chance: float) -> str:
    percent = 100 * chance
    if percent < 1:
        return "below 1 %"
    return "above 99 %" if percent > 99 else f"{percent:.0f} %"


@component("run_feature")
class EstimateSpec(RunFeatureSpec):
    """Estimate the final value of a metric while the run trains, with an 80 % interval."""

    name: Literal["estimate"] = "estimate"
    metric: str | None = None
    """A metric of evaluations, or train_loss; null: the main metric if training has eight
    evaluations, else train_loss."""
    runs: str | None = None
    """Folder of earlier runs of the recipe; null: the sweep's, or `outputs`."""
    every_share: Annotated[float, Field(gt=0, le=1)] = 0.05
    """Least share of the steps between two lines."""

    def open(self, recipe: Recipe) -> RunFeature:
        """Return the feature of a run. Raises ValueError for a metric that isn't logged."""
        if self.metric is not None and self.metric not in directions():
            problem = explain_unknown_name("metric", self.metric, directions())
            raise ValueError(f"metric = {self.metric}: {problem}")
        is_evaluated = self.metric not in (None, TRAIN_LOSS)
        if is_evaluated and not any(list_event_periods(recipe, 1)[Event.EVALUATE]):
            raise ValueError(
                f"metric = {self.metric}: isn't logged during training; add eval.every_steps or "
                "eval.every_epochs, or use train_loss"
            )
        return EstimatedEnd(self, recipe)


class CurveWatch(Monitor):
    """The curve of one run so far, from its events, and the curves that it is compared with."""

    def __init__(self, metric: str | None, total: int) -> None:
        self.metric = metric
        """The watched metric; None until the first evaluation decides."""
        self.total = total
        self._points: dict[int, float] = {}

    def on_length(self, total: int) -> None:
        self.total = total

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Note the losses, if they are watched."""
        if self.metric == TRAIN_LOSS:
            self._points |= zip(telemetry.steps.tolist(), telemetry.loss.tolist(), strict=True)

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Note the metric. Raises DataError if evaluations don't have it."""
        scalars = evaluation.scalars()
        if self.metric is None:
            self.metric = main_metric([scalars])
        if self.metric is None or self.metric == TRAIN_LOSS:
            return
        if self.metric not in scalars:
            raise DataError(
                f"{self.metric} isn't logged: evaluations have {', '.join(scalars)}; add it to "
                "eval.metrics"
            )
        self._points[step] = scalars[self.metric]

    def on_rollback(self, step: int, to: int) -> None:
        self._points = {at: value for at, value in self._points.items() if at <= to}

    def note(self, points: Mapping[int, float]) -> None:
        """Note values of the metric by step."""
        self._points |= points

    def read_logs(self, run_dir: Path) -> None:
        """Note what a resumed run has logged."""
        log = run_dir / (METRICS if self.metric == TRAIN_LOSS else EVALS)
        for line in read_lines(log) if log.is_file() else ():
            if self.metric is None:
                self.metric = main_metric([_list_numbers(line.fields)])
            name = "loss" if self.metric == TRAIN_LOSS else str(self.metric)
            number = finite_number(line.fields.get(name))
            if number is not None:
                self._points[line.step] = number

    def estimate(
        self, run_curves: Sequence[LearningCurve], step: int
    ) -> tuple[FinalError, Scale] | None:
        """Return the distribution of the final error and its scale, from the points up to a step;
        None for too few points.

        Raises DataError for values without a scale.
        """
        points = self._thin(step)
        if points is None or len(points[0]) < MIN_POINTS:
            return None
        shares, errors, scale = points
        final = extrapolate(shares, errors, [*self._read_shipped(), *run_curves[-MAX_OWN_CURVES:]])
        is_positive = scale == "share" and np.all(to_values(errors, scale) >= 0)
        return final.limit(float(to_errors(0, scale))) if is_positive else final, scale

    def judge(self, done: Sequence[LearningCurve], step: int, enough: float) -> float | None:
        """Return the chance that the run ends better than all that are done, at its highest.

        A chance of `enough` isn't computed further. None for fewer than three done runs, or too
        few points. Raises DataError for values without a scale.
        """
        points = self._thin(step)
        if points is None or len(done) < ENOUGH_CURVES:
            return None
        shares, errors, _ = points
        least = min(float(curve.errors[-1]) for curve in done)
        return find_highest_chance(
            shares, errors, self._read_shipped(), done[-MAX_OWN_CURVES:], least, enough
        )

    def _thin(self, step: int) -> tuple[np.ndarray, np.ndarray, Scale] | None:
        """Return shares, errors and scale of the points up to a step; None without any."""
        # A resumed run's log may have later points.
        points = {at: value for at, value in self._points.items() if at <= step}
        if self.metric is None or not points:
            return None
        shares, values = thin(list(points), list(points.values()), self.total, self.metric)
        scale = choose_scale(self.metric, values.tolist())
        return shares, to_errors(values, scale), scale

    def _read_shipped(self) -> Sequence[LearningCurve]:
        return read_shipped_curves("training" if self.metric == TRAIN_LOSS else "evaluation")


def _list_numbers(fields: Mapping[str, Any]) -> dict[str, float]:
    numbers = {name: finite_number(value) for name, value in fields.items()}
    return {name: number for name, number in numbers.items() if number is not None}


@dataclass
class EstimateMonitor(Monitor):
    """Prints the estimate and writes it to `estimate.json`, after evaluations, or sinks without."""

    watch: CurveWatch
    run_dir: Path
    sweep_dir: Path | None
    folder: Path
    recipe_name: str
    every_share: float
    reporter: Reporter
    shown_step: int = 0
    run_curves: Sequence[LearningCurve] | None = None

    def on_length(self, total: int) -> None:
        self.watch.on_length(total)

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        self.watch.on_steps(telemetry, seconds)
        if self.watch.metric == TRAIN_LOSS:
            self._show(telemetry.start + len(telemetry))

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        self.watch.on_eval(step, evaluation)
        self._show(step)

    def on_rollback(self, step: int, to: int) -> None:
        self.watch.on_rollback(step, to)

    def _show(self, step: int) -> None:
        total = self.watch.total
        is_due = step - self.shown_step >= self.every_share * total
        if not is_due or step >= total or self.watch.metric is None:
            return
        run_curves = self._read_own(self.watch.metric)
        estimated = self.watch.estimate(run_curves, step)
        if estimated is None:
            return
        self.shown_step = step
        value = describe_final_value(
            self.watch.metric, step, *estimated, run_curves, in_sweep=self.sweep_dir is not None
        )
        self.reporter.print_stage("estimate", str(value))
        content = format_json({**asdict(value), "text": str(value)})
        write_whole(self.run_dir / ESTIMATE, f"{content}\n")

    def _read_own(self, metric: str) -> Sequence[LearningCurve]:
        """Return the curves of earlier runs; a sweep's are read again, since its jobs end."""
        if self.sweep_dir is not None:
            return read_own_curves(find_jobs(self.sweep_dir), metric)
        if self.run_curves is None:
            runs = list_recipe_runs(self.folder, self.recipe_name, besides=self.run_dir)
            self.run_curves = read_own_curves(runs, metric)
        return self.run_curves


def describe_final_value(
    metric: str,
    step: int,
    final: FinalError,
    scale: Scale,
    run_curves: Sequence[LearningCurve],
    *,
    in_sweep: bool,
) -> FinalValue:
    """Return the estimate in units of the metric; in a sweep, `run_curves` are its jobs' curves."""
    errors = [final.quantile(share) for share in (LOW, 0.5, HIGH)]
    first, middle, last = (float(value) for value in to_values(errors, scale))
    best = chance = None
    if in_sweep and run_curves:
        least = min(float(curve.errors[-1]) for curve in run_curves)
        best = float(to_values(least, scale))
        chance = final.chance_below(least)
    low, high = min(first, last), max(first, last)
    return FinalValue(step, metric, low, middle, high, len(run_curves), best, chance)


class EstimatedEnd(RunFeature):
    """The feature: its monitor, once training opens."""

    def __init__(self, spec: EstimateSpec, recipe: Recipe) -> None:
        self._spec = spec
        self._recipe = recipe
        self._monitors: Sequence[Monitor] = ()

    def check(self, run: CompiledRun) -> None:
        """Make the monitor. Raises RecipeError if the run's folder of earlier runs is missing."""
        context = run.context
        if not context.ranks.is_first:
            return
        folder = Path(self._spec.runs) if self._spec.runs else OUTPUTS
        if self._spec.runs and not folder.is_dir():
            problem = "must be a folder of runs"
            raise RecipeError([f"run_features (estimate).runs = {folder}: {problem}"])
        schedule = run.built.run_schedule
        watch = CurveWatch(self._choose_metric(run), schedule.total)
        if context.resuming:
            watch.read_logs(context.run_dir)
        monitor = EstimateMonitor(
            watch,
            context.run_dir,
            context.run_dir.parent if context.options.changed else None,
            folder,
            self._recipe.name,
            self._spec.every_share,
            context.reporter,
        )
        self._monitors = [BestEffortMonitor(monitor, "the estimate", context.reporter.warn)]

    def record(self, run: CompiledRun, history: History) -> None:
        """Remove the file, since the run's summary has the result."""
        if run.context.ranks.is_first:
            (run.context.run_dir / ESTIMATE).unlink(missing_ok=True)

    def _choose_metric(self, run: CompiledRun) -> str | None:
        if self._spec.metric is not None:
            return self._spec.metric
        schedule = run.built.run_schedule
        periods = list_event_periods(self._recipe, schedule.steps_per_epoch)[Event.EVALUATE]
        count = schedule.total // min(periods) if periods else 0
        return None if count >= MIN_EVALUATIONS else TRAIN_LOSS

    @property
    def monitors(self) -> Sequence[Monitor]:
        return self._monitors
