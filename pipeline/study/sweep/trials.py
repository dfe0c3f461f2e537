"""Trials of a study, shared by any number of processes through its storage.

A process requests a trial, runs it as a job and reports its result, until there are enough trials.
A trial without heartbeats is taken for dead, as if its process had died, and is queued again under
another number. It resumes in the directory of its first try, from the last checkpoint. Only one
process requests trials at a time, so that there are never too many.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path

import optuna
from optuna.distributions import BaseDistribution
from optuna.storages import fail_stale_trials
from optuna.trial import Trial, TrialState

from pipeline.config.hydra_options import BasicSweeper
from pipeline.config.overrides import get_key
from pipeline.core.errors import RunError, printable
from pipeline.study.population.groups import require_members
from pipeline.study.sweep.directory import Command, hold_planning_lock, make_command, read_summary
from pipeline.study.sweep.history import EARLIER, read_trials
from pipeline.study.sweep.jobs import Job, require_pruner
from pipeline.study.sweep.plan import (
    POLL_S,
    Launch,
    PlannedJob,
    compose_job,
    enter_jobs,
    plan_job,
    run_all,
)
from pipeline.study.sweep.space import read_space, to_overrides, vary_one_at_a_time
from pipeline.study.sweep.study import (
    BaseHeartbeat,
    StudySettings,
    find_first_number,
    open_study,
    read_settings,
    send_heartbeats,
)
from pipeline.study.sweep.vectorized import Populations, choose_launch, read_places

REQUESTED = "asked"
"""Attribute of a trial that a process has requested and owns; its value is the trial's number."""


@dataclass(frozen=True)
class StudySearch:
    """An open study, with the keys that its trials vary and the overrides that they share."""

    study: optuna.Study
    storage: BaseHeartbeat
    """The study's storage, which receives heartbeats."""
    settings: StudySettings
    space: dict[str, BaseDistribution]
    command: Command
    fixed: Sequence[str]
    sweep_dir: Path


def sweep_study(sweeper: BasicSweeper, task: Job, overrides: Sequence[str]) -> None:
    """Run the remaining trials of a study, and print the best one."""
    places = read_places(sweeper)
    search = _open_search(sweeper, overrides)
    start = choose_launch(sweeper, task, places)
    while trials := _request_trials(search):
        try:
            with send_heartbeats(search.storage, trials):
                _run_trials(sweeper, search, trials, start)
        except BaseException:
            # Other processes needn't wait for missing heartbeats.
            _requeue_trials(search.study, [trial.number for trial in trials])
            raise
    _print_best(search)


def _open_search(sweeper: BasicSweeper, overrides: Sequence[str]) -> StudySearch:
    """Open the study of a command in its directory.

    Raises RecipeError for a wrong command, and Hydra's errors if a listed value can't be composed,
    both before the study is created. Raises RunError if the directory has another study.
    """
    assert sweeper.config is not None
    sweep_dir = Path(str(sweeper.config.hydra.sweep.dir))
    command = make_command(sweeper.config.hydra, overrides)
    space, fixed = read_space(command.arguments)
    settings = read_settings(sweeper.config.hydra.sweeper, sweep_dir)
    require_pruner(settings.pruner)
    choices = [[*fixed, *to_overrides(values)] for values in vary_one_at_a_time(space)]
    for choice in choices:
        compose_job(sweeper, choice)
    first = plan_job(sweeper, 0, choices[0], ())
    enter_jobs(sweep_dir, (), command, is_whole_grid=False)
    with hold_planning_lock(sweep_dir):
        study = open_study(settings, sweep_dir)
        if not study.get_trials(deepcopy=False):
            history = settings.history
            if history is not None and first.recipe is not None:
                trials, num_runs = read_trials(Path(history), first.recipe, space, settings.metric)
                print(
                    printable(f"{len(trials)} of {num_runs} runs in {history} are used as trials")
                )
                study.add_trials(trials)
    storage = study._storage
    assert isinstance(storage, BaseHeartbeat)
    return StudySearch(study, storage, settings, space, command, fixed, sweep_dir)


def _request_trials(search: StudySearch) -> list[Trial]:
    """Return the next trials for this process, trials of dead processes first.

    Returns [] when all are done. Waits while other processes run the last trials, since they may
    die and their trials are requested again.
    """
    is_waiting = False
    while True:
        with hold_planning_lock(search.sweep_dir):
            requeue_dead_trials(search)
            trials = search.study.get_trials(deepcopy=False)
            queued = [trial for trial in trials if trial.state == TrialState.WAITING]
            requested = [trial for trial in trials if EARLIER not in trial.user_attrs]
            started = {find_first_number(trial) for trial in requested}
            left = len(queued) + max(0, search.settings.n_trials - len(started))
            if left > 0:
                return [_request_trial(search) for _ in range(min(left, search.settings.n_jobs))]
        running = [trial for trial in trials if trial.state == TrialState.RUNNING]
        if not running:
            return []
        if not is_waiting:
            names = ", ".join(str(find_first_number(trial)) for trial in running)
            print(f"\nwaiting for other processes, which run trials {names}", flush=True)
        is_waiting = True
        time.sleep(POLL_S)


def _request_trial(search: StudySearch) -> Trial:
    """Request a trial with all its values, and send its first heartbeat."""
    trial = search.study.ask(search.space)
    search.storage.record_heartbeat(trial._trial_id)
    trial.set_user_attr(REQUESTED, trial.number)
    return trial


def requeue_dead_trials(search: StudySearch) -> None:
    """Queue trials again that lack heartbeats, or whose process died while requesting them.

    This process holds the planning lock, so no other process is requesting a trial.
    """
    fail_stale_trials(search.study)
    running = search.study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
    incomplete = [
        trial.number for trial in running if trial.user_attrs.get(REQUESTED) != trial.number
    ]
    _requeue_trials(search.study, incomplete)


def _requeue_trials(study: optuna.Study, numbers: Sequence[int]) -> None:
    """Mark trials that are running as failed, and queue them again without counting a retry."""
    for number in numbers:
        trial = study.trials[number]
        if trial.state == TrialState.RUNNING:
            # The new trial is added first, so that no trial is lost if this process ends here.
            study.add_trial(
                optuna.create_trial(
                    state=TrialState.WAITING,
                    params=trial.params,
                    distributions=trial.distributions,
                    system_attrs={"failed_trial": number, **trial.system_attrs},
                )
            )
            study.tell(number, state=TrialState.FAIL)


def _run_trials(
    sweeper: BasicSweeper, search: StudySearch, trials: Sequence[Trial], start: Launch
) -> None:
    """Run trials as jobs, and report their results to the study."""
    jobs = []
    for trial in trials:
        frozen = search.study.trials[trial.number]
        overrides = [*search.fixed, *to_overrides(trial.params)]
        keys = [get_key(name) for name in search.space]
        job = plan_job(sweeper, find_first_number(frozen), overrides, keys)
        numbered = (*job.overrides, f"hydra.sweeper.trial={trial.number}")
        jobs.append(replace(job, overrides=numbered))
    enter_jobs(search.sweep_dir, jobs, search.command, is_whole_grid=False)
    if isinstance(start, Populations):
        require_members(job.recipe for job in jobs if job.recipe is not None)
    run_all(jobs, {}, start)
    for trial, job in zip(trials, jobs, strict=True):
        _report_result(search, trial, job)


def _report_result(search: StudySearch, trial: Trial, job: PlannedJob) -> None:
    """Report a job's result to the study.

    Raises RunError if the job has no summary, or is done without the study's metric.
    """
    summary = read_summary(job.folder)
    metric = search.settings.metric
    if summary is None:
        raise RunError(f"{job.folder}: its summary was removed after the job had ended")
    value = summary.metric(metric)
    tell = partial(search.study.tell, trial, skip_if_finished=True)
    if summary.status == "done" and value is not None:
        tell(value)
    else:
        tell(state=TrialState.PRUNED if summary.status == "pruned" else TrialState.FAIL)
    if summary.status == "done" and metric not in summary.metrics:
        reason = f"must be in the summary of {job.folder}; the stage eval computes metrics"
        raise RunError(f"hydra.sweeper.metric = {metric}: {reason}")


def _print_best(search: StudySearch) -> None:
    done = search.study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
    if done:
        best = search.study.best_trial
        values = ", ".join(to_overrides(best.params))
        earlier = best.user_attrs.get(EARLIER)
        name = f"job {find_first_number(best)}" if earlier is None else f"the earlier {earlier}"
        metric = search.settings.metric
        print(f"\nbest: {name}, {metric} {best.value:.6g}: {printable(values)}", flush=True)
