"""Pruning: a trial's values are reported to its study, whose pruner may end the trial early."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from pipeline.core.errors import RunError
from pipeline.engine.callbacks.events import Evaluation, Pruner, SinkReport
from pipeline.study.runs.ranking import directions
from pipeline.study.sweep.study import open_study, read_settings
from pipeline.training.telemetry import Telemetry


class TrialPruner(Pruner):
    """Monitor that reports a trial's values and asks the study's pruner after every report.

    At the end of every sink it reports the sink's mean training loss, over steps with a finite
    loss, with its sign changed where a larger metric is better. With `by_evaluations` it reports
    the metric itself.
    """

    def __init__(self, trial: optuna.Trial, metric: str, *, by_evaluations: bool) -> None:
        self._trial, self._metric, self._by_evaluations = trial, metric, by_evaluations
        self._sign = 1.0 if directions()[metric] == "min" else -1.0
        self._loss, self._steps = 0.0, 0
        self._prune_reason: str | None = None

    @property
    def prune_reason(self) -> str | None:
        """Why the run should end at this boundary; None while it should continue."""
        return self._prune_reason

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Sum up finite losses."""
        losses = telemetry.loss[np.isfinite(telemetry.loss)]
        self._loss += float(losses.sum(dtype=float))
        self._steps += len(losses)

    def on_sink(self, report: SinkReport) -> None:
        """Report the mean training loss."""
        if not self._by_evaluations:
            mean = self._loss / self._steps if self._steps else math.nan
            self._report(self._sign * mean, report.step)
        self._loss, self._steps = 0.0, 0

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Report the metric."""
        if not self._by_evaluations:
            return
        scalars = evaluation.scalars()
        if self._metric not in scalars:
            problem = f"evaluations have no {self._metric}; add it to eval.metrics"
            raise RunError(f"hydra.sweeper.metric = {self._metric}: {problem}")
        self._report(scalars[self._metric], step)

    def _report(self, value: float, step: int) -> None:
        try:
            self._trial.report(value, step)
            poor = self._trial.should_prune()
        except optuna.exceptions.UpdateFinishedTrialError:
            # Taken for dead, the trial is retried elsewhere, where it will be found finished.
            return
        self._prune_reason = f"step {step}: {self._describe(value)} is poor" if poor else None

    def _describe(self, value: float) -> str:
        if self._by_evaluations:
            return f"{self._metric} {value:.4g}"
        return f"mean training loss {self._sign * value:.4g}"


def open_pruner(sweeper: Mapping[str, Any], sweep_dir: Path) -> TrialPruner:
    """The pruner of the trial that a job's configuration names."""
    settings = read_settings(sweeper, sweep_dir)
    study = open_study(settings, sweep_dir)
    trial = optuna.Trial(study, study.trials[sweeper["trial"]]._trial_id)
    return TrialPruner(trial, settings.metric, by_evaluations=settings.reports == "evaluations")
