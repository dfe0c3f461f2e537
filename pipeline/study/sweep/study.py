"""Study of a command with `hydra/sweeper=optuna`: its settings, its opening and its pruner."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from hydra.utils import instantiate
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial

from pipeline.core.errors import RecipeError, RunError
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import show
from pipeline.engine.callbacks.callback import Evaluation, Pruner, SinkReport
from pipeline.study.runs.ranking import TRAIN_LOSS, directions
from pipeline.study.sweep.storage import open_storage
from pipeline.training.telemetry import Telemetry

REPORTS = ("sinks", "evaluations")
"""Events at which a trial reports values to its pruner."""
WHOLE_NUMBERS = {"n_trials": 1, "n_jobs": 1, "heartbeat_s": 1, "max_retry": 0}
"""Settings that are whole numbers, with their least values."""
WARMED_PRUNERS = ("optuna.pruners.MedianPruner", "optuna.pruners.PercentilePruner")
"""Pruners that compare trials at any step, the first ones too, where a high learning rate has the
higher loss. Others have their own schedule."""


@dataclass(frozen=True)
class StudySettings:
    """Settings of a study."""

    metric: str
    reports: str
    """Event at which trials report, one of `REPORTS`."""
    n_trials: int
    """Number of trials of the study, by all processes and commands that work on it."""
    n_jobs: int
    """Trials that one process runs at a time."""
    history: str | None
    """Folder of earlier runs, whose results are the first trials."""
    storage: str | None
    """URL of a database; None for a journal in the sweep's directory."""
    study_name: str
    heartbeat_s: int
    """Seconds between the heartbeats of a trial."""
    max_retry: int
    """A dead trial is retried at most this often."""
    warmup_share: float
    """Share of a trial's steps before which `WARMED_PRUNERS` prune nothing."""
    sampler: Any
    """Class of Optuna, with its arguments."""
    pruner: Any
    """Class of Optuna, with its arguments."""

    @property
    def is_warmed(self) -> bool:
        """Whether `warmup_share` concerns the pruner."""
        return self.pruner["_target_"] in WARMED_PRUNERS

    @property
    def maximizes(self) -> bool:
        """Whether a larger metric is better."""
        return directions()[self.metric] == "max"


def read_settings(sweeper: Mapping[str, Any], sweep_dir: Path) -> StudySettings:
    """Read the settings from a configuration. Raises RecipeError with every problem."""
    metric = sweeper["metric"]
    problems = []
    if metric not in directions():
        problem = explain_unknown_name("metric", str(metric), directions())
        problems.append(f"hydra.sweeper.metric = {metric}: {problem}")
    if sweeper["reports"] not in REPORTS:
        rule = f"must be {' or '.join(REPORTS)}"
        problems.append(f"hydra.sweeper.reports = {sweeper['reports']}: {rule}")
    if sweeper["reports"] == "evaluations" and metric == TRAIN_LOSS:
        problem = f"must be sinks with metric={TRAIN_LOSS}, which evaluations don't have"
        problems.append(f"hydra.sweeper.reports = evaluations: {problem}")
    for name, least in WHOLE_NUMBERS.items():
        if type(sweeper[name]) is not int or sweeper[name] < least:
            rule = f"must be a whole number of at least {least}"
            problems.append(f"hydra.sweeper.{name} = {sweeper[name]}: {rule}")
    share = sweeper["warmup_share"]
    if isinstance(share, bool) or not isinstance(share, int | float) or not 0 <= share < 1:
        problem = "must be a number of at least 0 and below 1"
        problems.append(f"hydra.sweeper.warmup_share = {show(share)}: {problem}")
    if problems:
        raise RecipeError(problems)
    settings = {name: sweeper[name] for name in sweeper if name in StudySettings.__annotations__}
    settings["study_name"] = settings["study_name"] or str(sweep_dir)
    return StudySettings(**settings)


def open_study(settings: StudySettings, sweep_dir: Path) -> optuna.Study:
    """Open the study in its storage, and create it if it is missing.

    Raises RunError if it exists with another metric.
    """
    storage = open_storage(settings.storage, sweep_dir, settings.heartbeat_s, settings.max_retry)
    study = optuna.create_study(
        study_name=settings.study_name,
        storage=storage,
        sampler=instantiate(settings.sampler),
        pruner=instantiate(settings.pruner),
        direction="maximize" if settings.maximizes else "minimize",
        load_if_exists=True,
    )
    metric = study.user_attrs.get("metric")
    if metric is None:
        study.set_user_attr("metric", settings.metric)
    elif metric != settings.metric:
        problem = f"hydra.sweeper.metric = {settings.metric}: the study is about {metric}"
        raise RunError(f"{sweep_dir}: {problem}; name another study_name or directory")
    return study


def find_first_number(trial: FrozenTrial) -> int:
    """Return the number of a trial's first try, which is also the number of its job."""
    first = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    return trial.number if first is None else first


class TrialPruner(Pruner):
    """Monitor that reports a trial's values, and calls the study's pruner after every report.

    At the end of a sink it reports the mean of the sink's finite training losses. The mean is
    negated if a larger metric is better, since Optuna then prunes trials with small values. With
    `by_evaluations` it reports the metric instead, at evaluations.
    """

    prune_reason: str | None = None
    """Reason to end the run after the last report; None while it should continue."""

    def __init__(
        self,
        trial: optuna.Trial,
        metric: str,
        *,
        by_evaluations: bool,
        warmup_share: float = 0.0,
    ) -> None:
        self._trial = trial
        self._warmup_share = warmup_share
        self._warmup_steps = 0.0
        self._metric = metric
        self._by_evaluations = by_evaluations
        self._sign = 1.0 if directions()[metric] == "min" else -1.0
        self._loss_sum = 0.0
        self._num_losses = 0

    def on_length(self, total: int) -> None:
        """Note the number of steps that aren't enough to end the trial."""
        self._warmup_steps = self._warmup_share * total

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Add the finite losses to the sums of the sink."""
        losses = telemetry.loss[np.isfinite(telemetry.loss)]
        self._loss_sum += float(losses.sum(dtype=float))
        self._num_losses += len(losses)

    def on_sink(self, report: SinkReport) -> None:
        if not self._by_evaluations:
            mean = self._loss_sum / self._num_losses if self._num_losses else math.nan
            self._report_value(self._sign * mean, report.step)
        self._loss_sum = 0.0
        self._num_losses = 0

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        if not self._by_evaluations:
            return
        scalars = evaluation.scalars()
        if self._metric not in scalars:
            problem = f"evaluations have no {self._metric}; add it to eval.metrics"
            raise RunError(f"hydra.sweeper.metric = {self._metric}: {problem}")
        self._report_value(scalars[self._metric], step)

    def _report_value(self, value: float, step: int) -> None:
        try:
            self._trial.report(value, step)
            should_prune = step >= self._warmup_steps and self._trial.should_prune()
        except optuna.exceptions.UpdateFinishedTrialError:
            # The trial was taken for dead, and another process that retries it will finish its job.
            return
        if self._by_evaluations:
            text = f"{self._metric} {value:.4g}"
        else:
            text = f"mean training loss {self._sign * value:.4g}"
        self.prune_reason = f"step {step}: {text} is poor" if should_prune else None


def open_pruner(sweeper: Mapping[str, Any], sweep_dir: Path) -> TrialPruner:
    """Return the pruner of the trial that a job's configuration names."""
    settings = read_settings(sweeper, sweep_dir)
    study = open_study(settings, sweep_dir)
    trial = optuna.Trial(study, study.trials[sweeper["trial"]]._trial_id)
    return TrialPruner(
        trial,
        settings.metric,
        by_evaluations=settings.reports == "evaluations",
        warmup_share=settings.warmup_share if settings.is_warmed else 0.0,
    )
