"""Jobs of a sweep as populations: jobs that differ only in numbers share one compiled program."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass, field, replace
from functools import partial
from threading import Lock
from typing import Any

from hydra.core.utils import JobReturn
from rich.console import Console

from pipeline.config.hydra_options import BasicSweeper
from pipeline.config.overrides import value_of
from pipeline.core.errors import RecipeError, printable
from pipeline.core.host.signals import Signals, handle_signals
from pipeline.core.report_errors import report_errors
from pipeline.stages.record.run_directory import RECIPE, SUMMARY, read_status
from pipeline.stages.runner.context import RunOptions
from pipeline.stages.runner.open_run import convert_os_errors
from pipeline.study.population.groups import (
    ProgramKey,
    collect_numbers,
    find_differing_keys,
    group_recipes,
)
from pipeline.study.population.shared_program import Places, SharedProgram
from pipeline.study.population.shared_step import CompiledInError
from pipeline.study.sweep.directory import (
    claim_job,
    format_changed,
    is_finished,
    read_summary,
    resolve_sweeper,
)
from pipeline.study.sweep.jobs import Job, count_processors, run_with_summary
from pipeline.study.sweep.plan import Launch, PlannedJob, launch_jobs
from pipeline.study.sweep.table import update_table

KEY = "hydra.sweeper.vectorize"
MAX_PROGRAMS = 4
"""Programs that stay compiled for later trials of a study, or the number of groups of the latest
trials if that is larger; each uses memory."""
POLL_SIGNALS_S = 0.1
"""Seconds between two checks for signals, which only the main thread receives."""
PRINTED_METRICS = ("train_loss", "accuracy", "loss")
"""Metrics of a job that are printed at its end, if it has them."""

MemberRun = Callable[[Signals], None]
"""Function that trains a job until its end or a signal, and doesn't raise the job's errors."""


def read_places(sweeper: BasicSweeper) -> Places | None:
    """Return the number of jobs that train at once in a vectorized sweep; None in other sweeps.

    `true` stands for the number of processors. Raises RecipeError for other values than true, false
    and a whole number above 0, and for a launcher that starts processes.
    """
    assert sweeper.config is not None
    setting = sweeper.config.hydra.sweeper.get("vectorize")
    if setting is None or setting is False:
        return None
    if not isinstance(setting, int) or setting < 1:
        raise RecipeError([f"{KEY} = {setting}: must be true, false or a whole number above 0"])
    launcher = sweeper.config.hydra.runtime.choices.get("hydra/launcher")
    if launcher != "basic":
        problem = f"must be basic with {KEY}, which trains its jobs in this process"
        raise RecipeError([f"hydra/launcher = {launcher}: {problem}"])
    return Places(count_processors()) if setting is True else Places(setting, is_set_by_user=True)


def choose_launch(sweeper: BasicSweeper, task: Job, places: Places | None) -> Launch:
    """Return the function that starts jobs: in `places` of this process, else by the launcher."""
    return partial(launch_jobs, sweeper) if places is None else Populations(sweeper, task, places)


@dataclass(eq=False)
class Populations:
    """The populations of a sweep, with their programs by key."""

    sweeper: BasicSweeper | None
    """The sweeper, which launches jobs with invalid recipes; None if the recipes are checked."""
    task: Job
    places: Places
    compiled_in: set[str] = field(default_factory=set)
    """Keys of numbers that have turned out to decide what is compiled."""
    programs: dict[ProgramKey, SharedProgram] = field(default_factory=dict)
    _table_lock: Lock = field(default_factory=Lock)
    """Lock of the table, since all threads of a process write the same temporary file."""

    def __call__(self, jobs: Sequence[PlannedJob]) -> Sequence[JobReturn]:
        """Run jobs until all have ended. Raises KeyboardInterrupt if a signal stopped them."""
        invalid = [job for job in jobs if job.recipe is None]
        if invalid:
            assert self.sweeper is not None
            launch_jobs(self.sweeper, invalid)
        remaining = [job for job in jobs if job.recipe is not None]
        while remaining:
            remaining = self._run_groups(remaining)
        return []

    def _run_groups(self, jobs: Sequence[PlannedJob]) -> list[PlannedJob]:
        """Run jobs, and return the jobs that can't share the program of their group."""
        recipes = {job.folder.name: job.recipe for job in jobs if job.recipe is not None}
        jobs_by_name = {job.folder.name: job for job in jobs}
        groups = group_recipes(recipes, self.compiled_in)
        places = replace(self.places, count=min(self.places.count, len(jobs)))
        print(f"\n{_format_plan(groups, places.count)}", flush=True)
        refused_jobs: list[PlannedJob] = []
        runs = []
        for program, names in groups.items():
            members = [collect_numbers(recipes[name]) for name in names]
            shared = self._find_program(program, members, places)
            group = [jobs_by_name[name] for name in names]
            runs += [partial(self._run_member, job, shared, refused_jobs) for job in group]
        stopped = run_in_places(runs, places.count)
        if stopped is not None:
            raise KeyboardInterrupt(stopped)
        for program in groups:
            error = self.programs[program].refused
            if error is not None:
                self.compiled_in.update(error.keys)
        earlier = [program for program in self.programs if program not in groups]
        num_superfluous = max(0, len(self.programs) - MAX_PROGRAMS)
        for program in earlier[:num_superfluous]:
            del self.programs[program]
        return refused_jobs

    def _find_program(
        self, program: ProgramKey, members: Sequence[Mapping[str, float]], places: Places
    ) -> SharedProgram:
        """Return the program of a group: the existing one, if these jobs can use it too."""
        shared = self.programs.get(program)
        if shared is None or shared.refused or not all(map(shared.serves, members)):
            earlier_members = () if shared is None else shared.members
            self.programs[program] = SharedProgram((*earlier_members, *members), places)
        return self.programs[program]

    def _run_member(
        self,
        job: PlannedJob,
        shared: SharedProgram,
        refused_jobs: list[PlannedJob],
        signals: Signals,
    ) -> None:
        """Run an unfinished job; if it can't share the program, add it to `refused_jobs`."""
        if shared.refused is not None:
            refused_jobs.append(job)
            return
        with claim_job(job.folder) as is_claimed:
            if not is_claimed or is_finished(job.folder, self.task.failures):
                return
            (job.folder / SUMMARY).unlink(missing_ok=True)
            assert job.recipe is not None
            resumed = ", resumed" if (job.folder / RECIPE).exists() else ""
            recipe = job.recipe

            def attempt() -> int:
                try:
                    with open(os.devnull, "w", encoding="utf-8") as null_file:
                        options = RunOptions(
                            run_dir=job.folder,
                            changed=job.changed,
                            signals=signals,
                            programs=shared.open,
                            console=Console(file=null_file),
                        )
                        settings = self._resolve_settings(job)
                        return self.task.run_recipe(recipe, job.folder, settings, options)
                except CompiledInError:
                    (job.folder / SUMMARY).unlink(missing_ok=True)
                    refused_jobs.append(job)
                    return 0

            report_errors(partial(run_with_summary, job.folder, attempt), debug=recipe.debug)
            if job not in refused_jobs:
                # One write, since other threads print too.
                print(f"{_format_end(job)}{resumed}\n", end="", flush=True)
                with self._table_lock, convert_os_errors(job.folder.parent):
                    update_table(job.folder.parent)

    def _resolve_settings(self, job: PlannedJob) -> Mapping[str, Any]:
        """Return `hydra.sweeper` of a job; in a study with the number of its trial. Empty without a
        sweeper."""
        if self.sweeper is None:
            return {}
        trial = value_of(job.overrides, "hydra.sweeper.trial")
        assert self.sweeper.config is not None
        settings = resolve_sweeper(self.sweeper.config.hydra)
        return settings if trial is None else {**settings, "trial": int(trial)}


def _format_plan(groups: Mapping[ProgramKey, Sequence[str]], at_once: int) -> str:
    jobs = sum(map(len, groups.values()))
    if len(groups) == 1:
        return f"sweep      {jobs} jobs by one program, {at_once} at a time"
    keys = ", ".join(find_differing_keys(groups))
    return f"sweep      {jobs} jobs by {len(groups)} programs, for {keys}; {at_once} at a time"


def _format_end(job: PlannedJob) -> str:
    """Return the line of a job that has ended: its changed keys, its status and its metrics."""
    head = f"job {printable(job.folder.name):<6} {printable(format_changed(job.changed))}"
    summary = read_summary(job.folder)
    if summary is None:
        return f"{head}: {read_status(job.folder)}"
    text = f"{head}: {summary.status}, {summary.steps or 0:,} steps"
    for name in PRINTED_METRICS:
        value = summary.metric(name)
        if value is not None:
            text += f", {name} {value:.4g}"
    if summary.status == "failed" and summary.reason:
        text += f" ({printable(str(summary.reason))})"
    return text


def run_in_places(runs: Sequence[MemberRun], places: int) -> str | None:
    """Run members in their order, each in a thread, at most `places` at a time.

    A signal to stop reaches the active runs, and no further run begins. Returns the signal, as
    text; None if all have run. If a run raises, no further run begins either, and the first error
    is raised once the active runs have ended.
    """
    signals = Signals()
    member_signals = [Signals() for _ in runs]
    forwarded_saves = 0
    errors: list[BaseException] = []

    def run_unless_stopped(run: MemberRun, member_signal: Signals) -> None:
        if signals.stop is not None or errors:
            return
        try:
            run(member_signal)
        except BaseException as error:
            # Raised at the end: until then the active runs need the signals.
            errors.append(error)

    with (
        signals.hold_stops(),
        handle_signals(signals),
        ThreadPoolExecutor(places, "member") as threads,
    ):
        waiting: set[Future[None]] = {
            threads.submit(run_unless_stopped, run, member_signal)
            for run, member_signal in zip(runs, member_signals, strict=True)
        }
        while waiting:
            _, waiting = wait(waiting, POLL_SIGNALS_S, FIRST_COMPLETED)
            for member_signal in member_signals:
                member_signal.stop = member_signal.stop or signals.stop
                member_signal.saves += signals.saves - forwarded_saves
            forwarded_saves = signals.saves
    if errors:
        raise errors[0]
    return signals.stop
