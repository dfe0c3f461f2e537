"""Runs of an arena: trials of each value, the choice among them, and runs with fresh seeds.

Runs of one value on one workload share a program if their recipes allow it. A folder's finished
runs are read, not repeated, so an arena that was stopped continues with what is left.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from pipeline.core.errors import (
    DataError,
    RunError,
    printable,
)
from pipeline.core.files.atomic_write import LOCK, format_json, lock_file, write_json
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.trusted_files import require_real_folder
from pipeline.core.report_errors import report_errors
from pipeline.engine.monitors.log_lines import (
    EVALS,
    METRICS,
    finite_number,
    read_last_line,
    read_lines,
)
from pipeline.stages.record.run_directory import RECIPE, SUMMARY, read_written_at_ns
from pipeline.stages.runner.context import RunOptions
from pipeline.stages.runner.open_run import convert_os_errors
from pipeline.stages.runner.resumed_run import list_changed_keys
from pipeline.study.arena.contest import Contest, ContestBudget, Workload
from pipeline.study.population.groups import list_member_problems
from pipeline.study.population.shared_program import Places
from pipeline.study.runs.ranking import is_larger_better, main_metric
from pipeline.study.sweep.directory import claim_job, is_finished, read_summary, write_overrides
from pipeline.study.sweep.jobs import Job, count_processors, run_with_summary
from pipeline.study.sweep.plan import PlannedJob
from pipeline.study.sweep.vectorized import Populations

PLAN = "contest.json"
"""File of what an arena has declared, by which its folder is recognized."""
GROWING = ("trials", "seeds", "earlier_budgets")
"""Declarations in which commands of an arena may differ: runs that both have are the same."""
LARGEST_RISE = 1.5
"""A run has diverged if its last training losses are this many times the first one."""
LAST_SHARE = 0.1
"""Share of the steps at the end whose mean loss is compared with the first."""


@dataclass(frozen=True)
class ArenaRun:
    """The evaluations of a run."""

    steps: tuple[int, ...]
    values: tuple[float | None, ...]
    """The metric of each evaluation; None if it isn't finite."""
    step_ms: float | None
    """Measured time of a step."""
    has_diverged: bool

    @property
    def value(self) -> float | None:
        """The metric of the last evaluation; None if the run has diverged."""
        return None if self.has_diverged or not self.values else self.values[-1]

    def find_step(self, target: float, *, is_larger: bool) -> int | None:
        """Return the first step whose evaluation is at least as good as the target; None: none."""
        for step, value in zip(self.steps, self.values, strict=True):
            if value is not None and (value >= target if is_larger else value <= target):
                return step
        return None


@dataclass(frozen=True)
class Entry:
    """The runs of a value on a workload."""

    value: str
    trials: tuple[Mapping[str, float], ...]
    """The numbers of each trial by key."""
    trial_runs: tuple[ArenaRun, ...]
    """Their runs; empty if there was nothing to tune."""
    chosen: int | None
    """Number of the chosen trial; None if all have diverged."""
    finals: Mapping[int, ArenaRun]
    """Runs with fresh seeds, by seed; empty if all trials have diverged."""

    @property
    def settings(self) -> Mapping[str, float] | None:
        """The numbers of the chosen trial."""
        return None if self.chosen is None else self.trials[self.chosen]


@dataclass(frozen=True)
class Heat:
    """The entries of a workload, and the metric that compares them."""

    workload: Workload
    metric: str
    entries: tuple[Entry, ...]


@contextmanager
def hold_arena(folder: Path, contest: Contest) -> Iterator[Contest]:
    """Hold the folder of an arena against other processes, and record what is declared.

    Yields the contest with the smaller budgets that the folder had before. Raises RunError if
    another process holds it, if it has another arena, a larger budget or other files, and DataError
    if it is a link.
    """
    with convert_os_errors(folder):
        require_real_folder(folder)
        folder.mkdir(parents=True, exist_ok=True)
        plan = folder / PLAN
        foreign = [path.name for path in folder.iterdir() if path.name != LOCK]
        if foreign and not plan.exists():
            problem = f"has other files ({printable(min(foreign))})"
            raise RunError(f"{folder}: {problem}; name a new or an empty folder")
        with lock_file(folder / LOCK, wait=False) as lock:
            if lock is None:
                raise RunError(f"{folder}: another arena runs in it; name another folder, or wait")
            recorded = _read_plan(plan) if plan.exists() else {}
            if recorded:
                _require_same_contest(plan, recorded, contest)
                budgets = _list_earlier_budgets(plan, recorded, contest)
                contest = replace(contest, earlier_budgets=budgets)
            if recorded != contest.to_dict():
                write_json(plan, contest.to_dict())
            yield contest


def _read_plan(plan: Path) -> dict[str, Any]:
    """Return what a folder has declared. Raises DataError for a file that can't be read."""
    try:
        recorded = read_json(plan)
    except (OSError, ValueError) as error:
        raise DataError(f"{plan}: can't be read: {error}") from error
    if not isinstance(recorded, dict) or not recorded:
        raise DataError(f"{plan}: must hold keys and values")
    return recorded


def _require_same_contest(plan: Path, recorded: Mapping[str, Any], contest: Contest) -> None:
    for name, value in contest.to_dict().items():
        if name not in GROWING and format_json(recorded.get(name)) != format_json(value):
            earlier = format_json(recorded.get(name))
            text = f"its {name} is {earlier:.200}, this one's {format_json(value):.200}"
            raise RunError(f"{plan.parent}: has another arena: {text}; name another folder")


def _list_earlier_budgets(
    plan: Path, recorded: Mapping[str, Any], contest: Contest
) -> tuple[ContestBudget, ...]:
    """Return the smaller budgets that a folder had. Raises RunError if one was larger."""
    try:
        last = ContestBudget(int(recorded["trials"]), len(recorded["seeds"]))
        items = recorded.get("earlier_budgets", [])
        earlier = [ContestBudget(int(item["trials"]), int(item["seeds"])) for item in items]
    except (KeyError, TypeError, ValueError) as error:
        raise DataError(f"{plan}: must hold trials, seeds and earlier_budgets") from error
    budget = ContestBudget(contest.trials, contest.num_seeds)
    for name, count in vars(last).items():
        if getattr(budget, name) < count:
            text = f"has {count} {name}, this command {getattr(budget, name)}"
            rule = "runs whose results may be known can't be left out; name another folder"
            raise RunError(f"{plan.parent}: {text}: {rule}")
    return (*earlier, last) if last != budget else (*earlier,)


def run_heat(contest: Contest, workload: Workload, folder: Path) -> Heat:
    """Run what is left of a workload's runs, and return them all.

    Raises RecipeError if a recipe is invalid, before any of its runs begins, DataError if data
    can't be split, and RunError for a failure other than a divergence.
    """
    trials_by_value = {value: contest.list_trials(workload, value) for value in contest.values}
    recipes = {
        value: [
            contest.compose(workload, value, item, contest.tuning_seed, is_trial=True)
            for item in trials
        ]
        for value, trials in trials_by_value.items()
    }
    metric = workload.metric
    entries = []
    for index, value in enumerate(contest.values):
        trials = trials_by_value[value]
        place = folder / workload.name / f"{index}_{make_slug(value)}"
        label = f"{workload.name}: {contest.key}={printable(value)}"
        jobs: list[PlannedJob] = []
        choice: int | None = 0
        if len(trials) > 1:
            print(f"\n{label}, trials", flush=True)
            jobs = [
                PlannedJob(number, place / f"trial_{number}", (), trials[number], recipe)
                for number, recipe in enumerate(recipes[value])
            ]
            run_jobs(jobs)
            metric = metric or _find_metric(jobs)
            choice = choose_trial([read_run(job.folder, metric) for job in jobs], metric)
        final_jobs: list[PlannedJob] = []
        if choice is not None:
            print(f"\n{label}, fresh seeds", flush=True)
            final_jobs = [
                PlannedJob(
                    seed,
                    place / f"trial_{choice}_seed_{seed}",
                    (),
                    {"seed": seed},
                    contest.compose(workload, value, trials[choice], seed),
                )
                for seed in contest.final_seeds
            ]
            run_jobs(final_jobs)
            metric = metric or _find_metric(final_jobs)
        finals = {job.number: read_run(job.folder, metric) for job in final_jobs}
        runs = [read_run(job.folder, metric) for job in jobs]
        entries.append(Entry(value, tuple(trials), tuple(runs), choice, finals))
    return Heat(workload, metric or "loss", tuple(entries))


def choose_trial(runs: Sequence[ArenaRun], metric: str | None) -> int | None:
    """Return the number of the run with the best last evaluation, the first of equal ones; None if
    all have diverged."""
    sign = 1 if metric is not None and is_larger_better(metric) else -1
    values = [
        (sign * run.value, -number) for number, run in enumerate(runs) if run.value is not None
    ]
    return -max(values)[1] if values else None


def make_slug(value: str) -> str:
    """Return a value as part of a folder's name."""
    letters = "".join(letter if letter.isascii() and letter.isalnum() else "_" for letter in value)
    return letters[:40]


def run_jobs(jobs: Sequence[PlannedJob]) -> None:
    """Run the unfinished jobs, which share a program if possible.

    Raises RunError if a job fails other than by divergence; the next command runs it again.
    """
    for job in jobs:
        assert job.recipe is not None
        job.folder.mkdir(parents=True, exist_ok=True)
        if (job.folder / RECIPE).exists():
            if changed := list_changed_keys(job.recipe, job.folder):
                text = printable(changed[0].partition(";")[0])
                raise RunError(f"{job.folder}: is a run of another recipe: {text}; move it away")
        elif not any(job.folder.iterdir()):
            write_overrides(job.folder, job.changed)
    failures = {
        job.folder.name: read_written_at_ns(job.folder / SUMMARY)
        for job in jobs
        if _find_failure(job.folder) is not None
    }
    task = Job((), failures, "refuse")
    unfinished = [job for job in jobs if not is_finished(job.folder, failures)]
    if not unfinished:
        print(f"{len(jobs)} runs are done", flush=True)
        return
    recipes = [job.recipe for job in unfinished if job.recipe is not None]
    if list_member_problems(recipes):
        for job in unfinished:
            _run_alone(job, task)
    else:
        Populations(None, task, Places(count_processors()))(unfinished)
    for job in jobs:
        reason = _find_failure(job.folder)
        if reason is not None:
            raise RunError(f"{job.folder}: {reason}")


def _run_alone(job: PlannedJob, task: Job) -> None:
    """Run a job whose recipe can't share a program, such as on a GPU."""
    recipe = job.recipe
    assert recipe is not None
    with claim_job(job.folder) as is_claimed:
        if is_claimed:
            options = RunOptions(run_dir=job.folder, changed=job.changed)
            attempt: Callable[[], int] = partial(task.run_recipe, recipe, job.folder, {}, options)
            report_errors(partial(run_with_summary, job.folder, attempt), debug=recipe.debug)


def _find_failure(folder: Path) -> str | None:
    """Return why a run failed other than by divergence; None if it didn't."""
    summary = read_summary(folder)
    if summary is None or summary.status != "failed" or _ended_non_finite(folder):
        return None
    return printable(str(summary.reason))


def _ended_non_finite(folder: Path) -> bool:
    """Return whether the last step of a run isn't finite."""
    line = read_last_line(folder / METRICS)
    if line is None:
        return False
    numbers = line.numbers()
    return any(name in numbers and numbers[name] is None for name in ("loss", "grad_norm"))


def _find_metric(jobs: Sequence[PlannedJob]) -> str | None:
    """Return the main metric of the evaluations; None if no run was evaluated."""
    logs = [job.folder / EVALS for job in jobs]
    lines = [line for log in logs if log.exists() for line in read_lines(log)]
    return main_metric([dict.fromkeys(set(line.fields) - {"step"}, 0.0) for line in lines])


def read_run(folder: Path, metric: str | None) -> ArenaRun:
    """Read the evaluations of a finished run.

    Raises DataError if a file can't be read, and RunError if the evaluations lack the metric.
    """
    summary = read_summary(folder)
    steps: list[int] = []
    values: list[float | None] = []
    for line in read_lines(folder / EVALS) if (folder / EVALS).exists() else ():
        if metric is not None and metric not in line.fields:
            names = ", ".join(sorted(set(line.fields) - {"step", "count"}))
            raise RunError(f"{folder}: its evaluations have no {metric}; they have {names}")
        steps.append(line.step)
        values.append(None if metric is None else finite_number(line.fields.get(metric)))
    has_diverged = (
        summary is None
        or summary.status != "done"
        or not values
        or values[-1] is None
        or _has_risen(folder)
    )
    return ArenaRun(
        tuple(steps), tuple(values), summary.time.step_ms if summary else None, has_diverged
    )


def _has_risen(folder: Path) -> bool:
    """Return whether the mean of the last training losses is far above the first loss."""
    losses = [line.numbers().get("loss") for line in read_lines(folder / METRICS)]
    finite = [loss for loss in losses if loss is not None]
    if len(finite) < len(losses) or not finite:
        return True
    last = finite[-max(1, round(LAST_SHARE * len(finite))) :]
    return sum(last) / len(last) > LARGEST_RISE * finite[0]
