"""The trials of a study, shared by any number of processes through its storage.

A process asks for a trial, runs it as a job and tells what came of it, until there are as many
trials as wanted. A trial whose process died is found by its heart-beat and put up again under
another number; it goes on in the directory of its first try, from the last checkpoint there, or is
found done there. Asking is done by one process at a time, so that there are never too many.
"""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import optuna
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from optuna.distributions import BaseDistribution
from optuna.storages import fail_stale_trials
from optuna.storages._heartbeat import BaseHeartbeat
from optuna.trial import Trial, TrialState

from pipeline.errors import RunError
from pipeline.run_directory import SUMMARY
from pipeline.sweep.directory import alone
from pipeline.sweep.grid import launch
from pipeline.sweep.jobs import values_of
from pipeline.sweep.plan import POLL_S, PlannedJob, compose_job, enter, run_all
from pipeline.sweep.space import first_value, read_space, to_overrides
from pipeline.sweep.storage import beating
from pipeline.sweep.study import StudySettings, number_of_first_try, open_study, read_settings

ASKED = "asked"
"""The attribute of a trial that a process has asked for and looks after: the trial's number."""


@dataclass(frozen=True)
class Search:
    """A study with what its trials vary and what all of them share."""

    study: optuna.Study
    heart: BaseHeartbeat
    settings: StudySettings
    space: dict[str, BaseDistribution]
    command: Sequence[str]
    fixed: Sequence[str]
    sweep_dir: Path


def sweep_study(sweeper: BasicSweeper, arguments: Sequence[str]) -> None:
    """Run what is left to do of a study, and say which trial was best."""
    assert sweeper.config is not None
    sweep_dir = Path(str(sweeper.config.hydra.sweep.dir))
    command = [*arguments, *(f"{key}={value}" for key, value in sweeper.params.items())]
    space, fixed = read_space(command)
    settings = read_settings(sweeper.config.hydra.sweeper, sweep_dir)
    _compose_first(sweeper, space, fixed)
    enter(sweep_dir, (), command, grows=False)
    with alone(sweep_dir):
        study = open_study(settings, sweep_dir)
    heart = study._storage
    assert isinstance(heart, BaseHeartbeat)
    search = Search(study, heart, settings, space, command, fixed, sweep_dir)
    while trials := _next_trials(search):
        try:
            with beating(search.heart, trials):
                _run(sweeper, search, trials)
        except BaseException:
            # At once, as if their hearts had stopped.
            _put_up_again(search.study, [trial.number for trial in trials])
            raise
    _tell_best(search)


def _compose_first(
    sweeper: BasicSweeper, space: dict[str, BaseDistribution], fixed: Sequence[str]
) -> None:
    """Compose some trial, so that what can't be composed is told before there is a study."""
    values = {key: first_value(distribution) for key, distribution in space.items()}
    _compose(sweeper, 0, [*fixed, *to_overrides(values)], list(space))


def _compose(
    sweeper: BasicSweeper, number: int, overrides: Sequence[str], keys: Sequence[str]
) -> PlannedJob:
    assert sweeper.hydra_context is not None
    assert sweeper.config is not None
    loader, changed = sweeper.hydra_context.config_loader, values_of(overrides, keys)
    return compose_job(loader, sweeper.config, number, overrides, changed)


def _next_trials(search: Search) -> list[Trial]:
    """The next trials for this process: those of dead processes first; none when all are done.

    While other processes are at the last ones, wait: one of them might die.
    """
    waiting = False
    while True:
        with alone(search.sweep_dir):
            put_up_dead_trials(search)
            trials = search.study.get_trials(deepcopy=False)
            put_up = [trial for trial in trials if trial.state == TrialState.WAITING]
            begun = {number_of_first_try(trial) for trial in trials}
            left = len(put_up) + max(0, search.settings.n_trials - len(begun))
            if left > 0:
                return [_ask(search) for _ in range(min(left, search.settings.n_jobs))]
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        if not running:
            return []
        if not waiting:
            names = ", ".join(str(number_of_first_try(trial)) for trial in running)
            print(f"\nwaiting for other processes, at trials {names}", flush=True)
        waiting = True
        time.sleep(POLL_S)


def _ask(search: Search) -> Trial:
    """A trial with all its values, whose heart has beaten once."""
    trial = search.study.ask(search.space)
    search.heart.record_heartbeat(trial._trial_id)
    trial.set_user_attr(ASKED, trial.number)
    return trial


def put_up_dead_trials(search: Search) -> None:
    """Put up again what died: the heart has stopped, or the process did while it asked.

    Only one process asks at a time, so what is half asked for here has nobody any more.
    """
    fail_stale_trials(search.study)
    running = search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    half = [trial.number for trial in running if trial.user_attrs.get(ASKED) != trial.number]
    _put_up_again(search.study, half)


def _put_up_again(study: optuna.Study, numbers: Sequence[int]) -> None:
    """Fail those of the trials that are running still, and have them tried again.

    Nothing is wrong with them, so it does not count as a retry.
    """
    for number in numbers:
        trial = study.trials[number]
        if trial.state == TrialState.RUNNING:
            # First the new one: should this process end in between, one is found done.
            study.add_trial(
                optuna.create_trial(
                    state=TrialState.WAITING,
                    params=trial.params,
                    distributions=trial.distributions,
                    system_attrs={"failed_trial": number, **trial.system_attrs},
                )
            )
            study.tell(number, state=TrialState.FAIL)


def _run(sweeper: BasicSweeper, search: Search, trials: Sequence[Trial]) -> None:
    """Run trials as jobs, and tell the study what came of them."""
    jobs = []
    for trial in trials:
        frozen = search.study.trials[trial.number]
        overrides = [*search.fixed, *to_overrides(trial.params)]
        job = _compose(sweeper, number_of_first_try(frozen), overrides, list(search.space))
        jobs.append(job.with_override(f"hydra.sweeper.trial={trial.number}"))
    enter(search.sweep_dir, jobs, search.command, grows=False)
    assert sweeper.launcher is not None
    run_all(jobs, {}, partial(launch, sweeper.launcher, None))
    for trial, job in zip(trials, jobs, strict=True):
        _tell(search, trial, job)


def _tell(search: Search, trial: Trial, job: PlannedJob) -> None:
    """Tell the study what a job's summary says.

    Raises RunError where it says nothing of what the study is about.
    """
    summary = json.loads((job.folder / SUMMARY).read_text(encoding="utf-8"))
    metric, metrics = search.settings.metric, summary.get("metrics", {})
    value = metrics.get(metric)
    state = {"done": TrialState.COMPLETE, "pruned": TrialState.PRUNED}.get(summary["status"])
    if state is None or (state == TrialState.COMPLETE and value is None):
        state = TrialState.FAIL
    if state == TrialState.COMPLETE:
        value = value["macro"] if isinstance(value, dict) else value
        search.study.tell(trial, value, skip_if_finished=True)
    else:
        search.study.tell(trial, state=state, skip_if_finished=True)
    if summary["status"] == "done" and metric not in metrics:
        reason = f"{job.folder} has none in its summary; the stage eval computes metrics"
        raise RunError(f"hydra.sweeper.metric = {metric}: {reason}")


def _tell_best(search: Search) -> None:
    done = search.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if done:
        best = search.study.best_trial
        values = ", ".join(to_overrides(best.params))
        name = f"job {number_of_first_try(best)}"
        print(f"\nbest: {name}, {search.settings.metric} {best.value:.6g}: {values}", flush=True)
