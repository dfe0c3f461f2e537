"""The trials of a study, shared by any number of processes through its storage.

A process asks for a trial, runs it as a job and tells what came of it, until there are as many
trials as wanted. A trial whose process died is found by its heart-beat and put up again under
another number; it goes on in the directory of its first try, from the last checkpoint there, or is
found done there. Asking is done by one process at a time, so that there are never too many.
"""

from __future__ import annotations

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

from pipeline.config.overrides import key_of
from pipeline.errors import RunError, printable
from pipeline.sweep.command import Command, command_of
from pipeline.sweep.directory import alone
from pipeline.sweep.job_summary import read_summary
from pipeline.sweep.plan import PlannedJob, compose, enter, plan_job
from pipeline.sweep.run_pending import POLL_S, launch, run_all
from pipeline.sweep.space import one_at_a_time, read_space, to_overrides
from pipeline.sweep.storage import beating
from pipeline.sweep.study import StudySettings, number_of_first_try, open_study, read_settings

ASKED = "asked"
"""The attribute of a trial that a process has asked for and looks after: the trial's number."""


@dataclass(frozen=True)
class StudySearch:
    """A study with what its trials vary and what all of them share."""

    study: optuna.Study
    heart: BaseHeartbeat
    settings: StudySettings
    space: dict[str, BaseDistribution]
    command: Command
    fixed: Sequence[str]
    sweep_dir: Path


def sweep_study(sweeper: BasicSweeper, overrides: Sequence[str]) -> None:
    """Run what is left to do of a study, and say which trial was best."""
    search = _open(sweeper, overrides)
    while trials := _next_trials(search):
        try:
            with beating(search.heart, trials):
                _run(sweeper, search, trials)
        except BaseException:
            # At once, as if their hearts had stopped.
            _put_up_again(search.study, [trial.number for trial in trials])
            raise
    _tell_best(search)


def _open(sweeper: BasicSweeper, overrides: Sequence[str]) -> StudySearch:
    """The study that a command describes, in its directory.

    Raises RecipeError where the command is wrong, and what Hydra does where one of the values that
    are listed can't be composed, before there is a study; RunError where there is another one.
    """
    assert sweeper.config is not None
    sweep_dir = Path(str(sweeper.config.hydra.sweep.dir))
    command = command_of(sweeper.config.hydra, overrides)
    space, fixed = read_space(command.arguments)
    settings = read_settings(sweeper.config.hydra.sweeper, sweep_dir)
    for values in one_at_a_time(space):
        compose(sweeper, [*fixed, *to_overrides(values)])
    enter(sweep_dir, (), command, grows=False)
    with alone(sweep_dir):
        study = open_study(settings, sweep_dir)
    heart = study._storage
    assert isinstance(heart, BaseHeartbeat)
    return StudySearch(study, heart, settings, space, command, fixed, sweep_dir)


def _next_trials(search: StudySearch) -> list[Trial]:
    """The next trials for this process: those of dead processes first; none when all are done.

    While other processes are at the last ones, wait: one of them might die.
    """
    waiting = False
    while True:
        with alone(search.sweep_dir):
            requeue_dead_trials(search)
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


def _ask(search: StudySearch) -> Trial:
    """A trial with all its values, whose heart has beaten once."""
    trial = search.study.ask(search.space)
    search.heart.record_heartbeat(trial._trial_id)
    trial.set_user_attr(ASKED, trial.number)
    return trial


def requeue_dead_trials(search: StudySearch) -> None:
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


def _run(sweeper: BasicSweeper, search: StudySearch, trials: Sequence[Trial]) -> None:
    """Run trials as jobs, and tell the study what came of them."""
    jobs = []
    for trial in trials:
        frozen = search.study.trials[trial.number]
        overrides = [*search.fixed, *to_overrides(trial.params)]
        keys = [key_of(name) for name in search.space]
        job = plan_job(sweeper, number_of_first_try(frozen), overrides, keys)
        jobs.append(job.with_override(f"hydra.sweeper.trial={trial.number}"))
    enter(search.sweep_dir, jobs, search.command, grows=False)
    assert sweeper.launcher is not None
    run_all(jobs, {}, partial(launch, sweeper.launcher, None))
    for trial, job in zip(trials, jobs, strict=True):
        _tell(search, trial, job)


def _tell(search: StudySearch, trial: Trial, job: PlannedJob) -> None:
    """Tell the study what a job's summary says.

    Raises RunError where it says nothing of what the study is about, DataError where it can't be
    read.
    """
    summary, metric = read_summary(job.folder), search.settings.metric
    if summary is None:
        raise RunError(f"{job.folder}: the job ended, and its summary was removed")
    value, tell = summary.metric(metric), partial(search.study.tell, trial, skip_if_finished=True)
    if summary.status == "done" and value is not None:
        tell(value)
    else:
        tell(state=TrialState.PRUNED if summary.status == "pruned" else TrialState.FAIL)
    if summary.status == "done" and metric not in summary.metrics:
        reason = f"{job.folder} has none in its summary; the stage eval computes metrics"
        raise RunError(f"hydra.sweeper.metric = {metric}: {reason}")


def _tell_best(search: StudySearch) -> None:
    done = search.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if done:
        best = search.study.best_trial
        values = ", ".join(to_overrides(best.params))
        name = f"job {number_of_first_try(best)}"
        metric = search.settings.metric
        print(f"\nbest: {name}, {metric} {best.value:.6g}: {printable(values)}", flush=True)
