"""The study that a command describes: `hydra.sweeper` of `hydra/sweeper=optuna`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import optuna
from hydra.utils import instantiate
from optuna.storages import RetryHeartbeatStaleTrialCallback
from optuna.trial import FrozenTrial

from pipeline.core.errors import RecipeError, RunError
from pipeline.core.files.error_text import no_such
from pipeline.core.registry import parts
from pipeline.study.sweep.storage import open_storage
from pipeline.training.part_specs import Direction, metric_directions

TRAIN_LOSS = "train_loss"
REPORTS = ("sinks", "evaluations")
"""Events at which a trial's values are reported to its pruner."""
WHOLE_NUMBERS = {"n_trials": 1, "n_jobs": 1, "heartbeat_s": 1, "max_retry": 0}
"""Settings that are whole numbers, and their lower bounds."""


@dataclass(frozen=True)
class StudySettings:
    """Settings of a study; `sampler` and `pruner` name classes of Optuna and their arguments.

    `n_trials` counts the trials of all processes and commands; one process runs `n_jobs` at a time.
    `history` is a folder of earlier runs, whose results the study begins with.
    A trial sends a heartbeat every `heartbeat_s`; a dead one is retried up to `max_retry` times.
    """

    metric: str
    reports: str
    n_trials: int
    n_jobs: int
    history: str | None
    storage: str | None
    study_name: str
    heartbeat_s: int
    max_retry: int
    sampler: Any
    pruner: Any

    @property
    def maximizes(self) -> bool:
        """Whether a larger metric is better."""
        return directions()[self.metric] == "max"


def directions() -> Mapping[str, Direction]:
    """The metrics that a study can optimize, and whether larger or smaller is better."""
    return {**metric_directions(parts("metric")), TRAIN_LOSS: "min"}


def read_settings(sweeper: Mapping[str, Any], sweep_dir: Path) -> StudySettings:
    """Read the settings from a configuration. Raises RecipeError with every problem."""
    metric = sweeper["metric"]
    problems = []
    if metric not in directions():
        problem = no_such("metric", str(metric), directions())
        problems.append(f"hydra.sweeper.metric = {metric}: {problem}")
    if sweeper["reports"] not in REPORTS:
        rule = f"must be {' or '.join(REPORTS)}"
        problems.append(f"hydra.sweeper.reports = {sweeper['reports']}: {rule}")
    if sweeper["reports"] == "evaluations" and metric == TRAIN_LOSS:
        problem = f"{TRAIN_LOSS} is none of what evaluations say; leave it at sinks"
        problems.append(f"hydra.sweeper.reports = evaluations: {problem}")
    for name, least in WHOLE_NUMBERS.items():
        if not isinstance(sweeper[name], int) or sweeper[name] < least:
            rule = f"must be a whole number, {least} or more"
            problems.append(f"hydra.sweeper.{name} = {sweeper[name]}: {rule}")
    if problems:
        raise RecipeError(problems)
    given = {name: sweeper[name] for name in sweeper if name in StudySettings.__annotations__}
    return StudySettings(**{**given, "study_name": given["study_name"] or str(sweep_dir)})


def open_study(settings: StudySettings, sweep_dir: Path) -> optuna.Study:
    """Open the study in its storage, and create it where it is missing.

    Raises RunError where it exists with another metric.
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
    about = study.user_attrs.get("metric")
    if about is None:
        study.set_user_attr("metric", settings.metric)
    elif about != settings.metric:
        problem = f"hydra.sweeper.metric = {settings.metric}: the study is about {about}"
        raise RunError(f"{sweep_dir}: {problem}; name another directory")
    return study


def number_of_first_try(trial: FrozenTrial) -> int:
    """The number of the trial that this one retries, else its own: the number of its job."""
    first = RetryHeartbeatStaleTrialCallback.retried_trial_number(trial)
    return trial.number if first is None else first
