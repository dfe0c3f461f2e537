"""Pruning: a trial's course is reported to its study, which may find it poor."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np
import optuna

from pipeline.observe.monitors import Evaluation, MonitorBase, SinkReport
from pipeline.sink.telemetry import Telemetry
from pipeline.sweep.study import DIRECTIONS, open_study, read_settings


class TrialPruner(MonitorBase):
    """Reports a trial's course, and asks its study's pruner at every report.

    Reported is, at the end of every sink, the mean training loss over it, steps left out that have
    none (`on_nan` goes on behind them), with its sign turned where more of the metric is better;
    or, `by_evaluations`, the metric itself.
    """

    def __init__(self, trial: optuna.Trial, metric: str, *, by_evaluations: bool) -> None:
        self._trial, self._metric, self._by_evaluations = trial, metric, by_evaluations
        self._sign = 1.0 if DIRECTIONS[metric] == "min" else -1.0
        self._loss, self._steps = 0.0, 0
        self._prune_reason: str | None = None

    @property
    def prune_reason(self) -> str | None:
        """Why the run should end at this boundary; None while it should go on."""
        return self._prune_reason

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Add up losses."""
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
        if self._by_evaluations:
            self._report(evaluation.scalars()[self._metric], step)

    def _report(self, value: float, step: int) -> None:
        try:
            self._trial.report(value, step)
            poor = self._trial.should_prune()
        except optuna.exceptions.UpdateFinishedTrialError:
            # Taken for dead, it is tried again elsewhere: there it will be found done.
            return
        self._prune_reason = f"step {step}: {self._told(value)} is poor" if poor else None

    def _told(self, value: float) -> str:
        if self._by_evaluations:
            return f"{self._metric} {value:.4g}"
        return f"mean training loss {self._sign * value:.4g}"


def open_pruner(sweeper: Mapping[str, Any], sweep_dir: Path) -> TrialPruner:
    """The judge of the trial that a job's configuration names."""
    settings = read_settings(sweeper, sweep_dir)
    study = open_study(settings, sweep_dir)
    trial = optuna.Trial(study, study.trials[sweeper["trial"]]._trial_id)
    return TrialPruner(trial, settings.metric, by_evaluations=settings.reports == "evaluations")
