"""Study of a command with `hydra/sweeper=optuna`: settings, opening, pruner and storage.

Any number of processes work on a study. By default it is Optuna's journal, a file in the sweep's
directory; a URL names a database. Running trials send heartbeats, by which dead processes are
found. Optuna has heartbeats for databases only. For a journal, a heartbeat touches a file of its
trial. To find old heartbeats, another file is touched and the times are compared, so that only the
file server's clock matters.
"""

from __future__ import annotations

import logging
import math
import threading
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import optuna
from hydra.utils import instantiate
from optuna.storages import BaseStorage, RDBStorage, RetryHeartbeatStaleTrialCallback
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.storages.journal import JournalFileBackend, JournalStorage
from optuna.storages.journal._file import BaseJournalFileLock
from optuna.trial import FrozenTrial, Trial, TrialState

from pipeline.core.errors import RecipeError, RunError, first_line, printable_lines
from pipeline.core.files.atomic_write import Lock
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import show
from pipeline.engine.callbacks.callback import Evaluation, Pruner, SinkReport
from pipeline.study.runs.ranking import TRAIN_LOSS, directions
from pipeline.study.sweep.directory import BEATS, JOURNAL, JOURNAL_LOCK
from pipeline.training.telemetry import Telemetry

REPORTS = ("sinks", "evaluations")
"""Events at which a trial reports values to its pruner."""
WHOLE_NUMBERS = {"n_trials": 1, "n_jobs": 1, "heartbeat_s": 1, "max_retry": 0}
"""Settings that are whole numbers, with their least values."""
WARMED_PRUNERS = ("optuna.pruners.MedianPruner", "optuna.pruners.PercentilePruner")
"""Pruners that compare trials at any step, the first ones too, where a high learning rate has the
higher loss. Others have their own schedule."""
MAX_JOURNAL_BYTES = 2**30
"""Largest journal, which every process of a study reads: some million reports of trials."""
GRACE_BEATS = 3
"""Number of missed heartbeats after which a trial counts as dead."""
StaleCallback = Callable[[optuna.Study, FrozenTrial], None]


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
    if sweeper["reports"] == "sinks" and metric != TRAIN_LOSS and _is_estimate(sweeper):
        problem = f"must be evaluations with pruner=estimate, which extrapolates {metric}"
        problems.append(f"hydra.sweeper.reports = sinks: {problem}")
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


def _is_estimate(sweeper: Mapping[str, Any]) -> bool:
    """Return whether the pruner extrapolates the metric itself."""
    return str(sweeper["pruner"]["_target_"]).endswith(".EstimatePruner")


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
    `by_evaluations` it reports the metric instead, at evaluations. A pruner with the attribute
    `total` gets the steps of the whole trial; its `reason`, if it has one, is printed.
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
        pruner: Any = self._trial.study.pruner
        if hasattr(pruner, "total"):
            pruner.total = total

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
        reason = getattr(self._trial.study.pruner, "reason", None) or f"{text} is poor"
        self.prune_reason = f"step {step}: {reason}" if should_prune else None


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


class FileLock(BaseJournalFileLock):
    """A lock that the kernel releases when its process dies. Optuna's would remain for 30 s."""

    def __init__(self, path: Path) -> None:
        self._lock = Lock(path)

    def acquire(self) -> bool:
        return self._lock.acquire(wait=True)

    def release(self) -> None:
        self._lock.release()


class BeatingJournal(JournalStorage, BaseHeartbeat):
    """Optuna's journal with heartbeats: a file per trial, touched at every heartbeat."""

    def __init__(self, folder: Path, interval_s: int, callback: StaleCallback) -> None:
        self._beats = folder / BEATS
        self._interval_s = interval_s
        self._callback = callback
        self._beats.mkdir(parents=True, exist_ok=True)
        lock = FileLock(folder / JOURNAL_LOCK)
        super().__init__(JournalFileBackend(str(folder / JOURNAL), lock))

    def record_heartbeat(self, trial_id: int) -> None:
        (self._beats / str(trial_id)).touch()

    def _get_stale_trial_ids(self, study_id: int) -> list[int]:
        probe = self._beats / "now"
        probe.touch()
        oldest_s = probe.stat().st_mtime - GRACE_BEATS * self._interval_s
        running = self.get_all_trials(study_id, deepcopy=False, states=(TrialState.RUNNING,))
        return [trial._trial_id for trial in running if self._read_last_beat_s(trial) < oldest_s]

    def _read_last_beat_s(self, trial: FrozenTrial) -> float:
        """Return the time of a trial's last heartbeat in s; infinite, so not stale, without one."""
        try:
            return (self._beats / str(trial._trial_id)).stat().st_mtime
        except FileNotFoundError:
            return math.inf

    def get_heartbeat_interval(self) -> int:
        return self._interval_s

    def get_heartbeat_stale_trial_callback(self) -> StaleCallback:
        """Return the function that Optuna calls for a dead trial."""
        return self._callback


def open_storage(url: str | None, sweep_dir: Path, interval_s: int, max_retry: int) -> BaseStorage:
    """Open the journal in a sweep's directory, or the database that a URL names.

    Dead trials are queued again, at most `max_retry` times each. Raises RunError if the journal or
    the database can't be opened.
    """
    _silence_optuna()
    retry = RetryHeartbeatStaleTrialCallback(max_retry=max_retry)
    try:
        if url is None:
            journal = sweep_dir / JOURNAL
            if journal.exists() and not journal.is_file():
                raise ValueError("must be a regular file")
            if journal.exists() and journal.stat().st_size > MAX_JOURNAL_BYTES:
                # Every process would read the whole file.
                raise ValueError(
                    f"must have at most {MAX_JOURNAL_BYTES:,} bytes; a database can have more"
                )
            return BeatingJournal(sweep_dir, interval_s, retry)
        return RDBStorage(
            url,
            heartbeat_interval=interval_s,
            grace_period=GRACE_BEATS * interval_s,
            heartbeat_stale_trial_callback=retry,
        )
    except Exception as error:  # a wrong URL, an unreachable server, a file that isn't a journal
        source = sweep_dir / JOURNAL if url is None else f"hydra.sweeper.storage = {url}"
        raise RunError(f"{source}: can't open the study: {first_line(error)}") from error


def _silence_optuna() -> None:
    """Hide Optuna's log below warnings, and its warnings of experimental features and heartbeats.

    Optuna warns that only `Study.optimize` sends heartbeats, but `send_heartbeats` sends them here.
    """
    optuna.logging.set_verbosity(logging.WARNING)
    warnings.filterwarnings("ignore", category=optuna.exceptions.ExperimentalWarning)
    warnings.filterwarnings("ignore", "Heartbeat of storage is supposed", UserWarning)


@contextmanager
def send_heartbeats(storage: BaseHeartbeat, trials: Sequence[Trial]) -> Iterator[None]:
    """Send the heartbeats of trials to `storage` during the body, the first one immediately."""
    interval_s = storage.get_heartbeat_interval()
    ended = threading.Event()

    def beat() -> None:
        for trial in trials:
            storage.record_heartbeat(trial._trial_id)

    def keep_beating() -> None:
        while not ended.wait(interval_s):
            try:
                beat()
            except Exception as error:  # a server that is unreachable for a while
                warning = f"warning: a heartbeat could not be recorded: {error}"
                print(printable_lines(warning), flush=True)

    beat()
    thread = threading.Thread(target=keep_beating, name="heartbeats", daemon=True)
    thread.start()
    try:
        yield
    finally:
        ended.set()
        thread.join()
