"""Trials of a study, shared by any number of processes through its storage, and the search space:
Optuna's distributions for Hydra's sweep syntax.

A process requests a trial, runs it as a job and reports its result, until there are enough trials.
A trial without heartbeats is taken for dead, as if its process had died, and is queued again under
another number. It resumes in the directory of its first try, from the last checkpoint. Only one
process requests trials at a time, so that there are never too many.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

import optuna
from hydra.core.override_parser.overrides_parser import OverridesParser
from hydra.core.override_parser.types import IntervalSweep, Override, RangeSweep
from optuna.distributions import BaseDistribution
from optuna.storages import fail_stale_trials
from optuna.trial import Trial, TrialState

from pipeline.config.defaults import mark_optional_keys
from pipeline.config.hydra_options import BasicSweeper
from pipeline.config.overrides import find_parse_problems, get_key
from pipeline.core.errors import RecipeError, RunError, printable
from pipeline.core.files.value_text import show
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
from pipeline.study.sweep.study import (
    BaseHeartbeat,
    StudySettings,
    find_first_number,
    open_study,
    read_settings,
    send_heartbeats,
)
from pipeline.study.sweep.vectorized import Populations, choose_launch, read_places

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution


def read_space(arguments: Sequence[str]) -> tuple[dict[str, BaseDistribution], list[str]]:
    """Return the keys to search with their distributions, and the fixed overrides.

    Raises RecipeError for an invalid override or range, and without a key to search.
    """
    problems = [
        f"{show(override)}: {problem}" for override, problem in find_parse_problems(arguments)
    ]
    if problems:
        raise RecipeError(problems)
    space: dict[str, BaseDistribution] = {}
    fixed: list[str] = []
    for override in OverridesParser.create().parse_overrides(list(arguments)):
        if override.is_sweep_override():
            space[_name_key(override)] = _make_distribution(override)
        else:
            assert override.input_line is not None
            fixed.append(override.input_line)
    if not space:
        examples = "'train.optimizer.lr=tag(log,interval(0.001,0.1))' or train.batch_size=16,32"
        raise RecipeError(f"hydra/sweeper = optuna: must have a key to search, such as {examples}")
    return space, fixed


def _name_key(override: Override) -> str:
    """Return a key's name for Optuna, without a prefix `++` if `to_overrides` adds it."""
    name = override.get_key_element()
    plain = get_key(name)
    return plain if mark_optional_keys([f"{plain}="]) != [f"{plain}="] else name


def _make_distribution(override: Override) -> BaseDistribution:
    """Return the distribution of a sweep: an interval, a range with its steps, or a list."""
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    value = override.value()
    try:
        if isinstance(value, IntervalSweep):
            low = value.start
            high = value.end
            assert low is not None
            assert high is not None
            log = "log" in value.tags
            if isinstance(low, int) and isinstance(high, int):
                return IntDistribution(low, high, log=log)
            return FloatDistribution(low, high, log=log)
        if not isinstance(value, RangeSweep) or value.shuffle:
            return CategoricalDistribution(list(override.sweep_string_iterator()))
        values = list(value.range())
        if not values:
            raise ValueError("the range has no values; must have one")
        step = abs(value.step)
        if all(isinstance(item, int) for item in values):
            return IntDistribution(int(min(values)), int(max(values)), step=int(step))
        return FloatDistribution(float(min(values)), float(max(values)), step=float(step))
    except ValueError as error:
        raise RecipeError(f"{override.input_line}: {error}") from error


def to_overrides(params: Mapping[str, Any]) -> list[str]:
    """Return the overrides for a trial's values."""
    return mark_optional_keys(f"{key}={value}" for key, value in params.items())


def vary_one_at_a_time(space: Mapping[str, BaseDistribution]) -> list[dict[str, Any]]:
    """Return values of trials, so that every listed choice is in a trial.

    Each trial varies one key; the other keys have their first value. A range has only its lowest
    value: if a recipe can be composed with one number, it can be with any.
    """
    values_by_key = {key: _list_values(distribution) for key, distribution in space.items()}
    first = {key: values[0] for key, values in values_by_key.items()}
    trials = [first]
    for key, values in values_by_key.items():
        trials += [{**first, key: value} for value in values[1:]]
    return trials


def _list_values(distribution: BaseDistribution) -> Sequence[Any]:
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    if isinstance(distribution, CategoricalDistribution):
        return distribution.choices
    assert isinstance(distribution, IntDistribution | FloatDistribution)
    return (distribution.low,)


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
