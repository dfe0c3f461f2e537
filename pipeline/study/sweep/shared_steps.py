"""Steps that jobs of a grid share are trained once, and the jobs are forks after them.

Jobs that differ in length and schedule alone make the same steps until the first with another
learning rate. A trunk is such a stretch of steps, a run in the folder SHARED of the sweep; it goes
on from another trunk or from the start. A job begins as a fork of its last trunk.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.utils import JobReturn

from pipeline.checkpoint.checkpoint_folder import (
    FOLDER,
    list_saved_steps,
    make_checkpoint_path,
    remove_checkpoint,
)
from pipeline.config.hydra_options import BasicSweeper
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import count_total_steps, list_event_periods, schedule_run
from pipeline.core.errors import PipelineError, RecipeError
from pipeline.core.files.atomic_write import lock_file
from pipeline.core.files.tree_diff import iterate_leaves
from pipeline.core.files.value_text import count_noun, join_first
from pipeline.core.reporter import Reporter
from pipeline.engine.schedule import Event, is_due
from pipeline.stages.build import make_learning_rates
from pipeline.stages.data import declare_data, load_data
from pipeline.stages.fork import (
    RATE_PATHS,
    Fork,
    RateTable,
    copy_fork,
    count_equal_steps,
    is_evaluation_due,
)
from pipeline.stages.record.provenance import read_provenance
from pipeline.stages.record.run_directory import APPENDED, CLAIM, RECIPE, read_status
from pipeline.stages.run import run
from pipeline.stages.runner.context import RunOptions
from pipeline.study.sweep.directory import claim_job
from pipeline.study.sweep.jobs import train_in_one_process
from pipeline.study.sweep.plan import PlannedJob, launch_jobs

KEY = "hydra.sweeper.share"
SHARED = ".shared"
MAX_NAMED = 8
DIGITS = 12


@dataclass(frozen=True)
class Trunk:
    """Steps `start + 1` to `stop`, which jobs share."""

    name: str
    parent: str | None
    """The trunk with the steps before; None: the start."""
    start: int
    stop: int
    jobs: tuple[str, ...]
    """Jobs that begin with these steps; the first has the recipe."""


@dataclass(frozen=True, eq=False)
class SharingJob:
    """A job that may share steps."""

    recipe: Recipe
    table: RateTable
    steps_per_epoch: int
    digest: str
    """Digest of all keys but length and schedule."""

    def is_saved(self, step: int) -> bool:
        """Return whether a checkpoint is due at a step, besides the last one."""
        return is_due(step, list_event_periods(self.recipe, self.steps_per_epoch)[Event.CHECKPOINT])

    def round_down(self, step: int) -> int:
        """Return the last step up to `step` with a checkpoint, or `step` if there is none.

        So a job has the checkpoints that it would have alone.
        """
        periods = list_event_periods(self.recipe, self.steps_per_epoch)[Event.CHECKPOINT]
        return max((step // period * period for period in periods), default=0) or step


def count_shared_steps(one: SharingJob, other: SharingJob) -> int:
    """Return how many steps two jobs can share; each has at least one of its own."""
    if one.digest != other.digest:
        return 0
    steps = count_equal_steps(one.table, other.table)
    return one.round_down(min(steps, one.table.total - 1, other.table.total - 1))


def plan_trunks(jobs: Mapping[str, SharingJob]) -> list[Trunk]:
    """Return the trunks of jobs, each after its parent."""
    return list(_split(tuple(jobs), jobs, 0, None))


def _split(
    names: tuple[str, ...], jobs: Mapping[str, SharingJob], start: int, parent: str | None
) -> Iterator[Trunk]:
    """Yield the trunks of jobs that share `start` steps."""
    if len(names) < 2:
        return
    first = jobs[names[0]]
    stop = min(count_shared_steps(first, jobs[name]) for name in names[1:])
    if stop > start:
        rates = first.table.rates[:stop].tobytes()
        digest = hashlib.sha256(f"{first.digest} {stop} ".encode() + rates).hexdigest()
        trunk = Trunk(digest[:DIGITS], parent, start, stop, names)
        yield trunk
        start, parent = stop, trunk.name
    groups: list[list[str]] = []
    for name in names:
        for group in groups:
            if count_shared_steps(jobs[group[0]], jobs[name]) > start:
                group.append(name)
                break
        else:
            groups.append([name])
    for group in groups:
        yield from _split(tuple(group), jobs, start, parent)


def open_sharing(sweeper: BasicSweeper, jobs: Sequence[PlannedJob]) -> SharedSteps:
    """Plan which steps jobs share, and print it.

    Raises RecipeError if a job has keys with which it can't be a fork, or if no two jobs share a
    step; DataError if data can't be read.
    """
    assert sweeper.config is not None
    launcher = sweeper.config.hydra.runtime.choices.get("hydra/launcher")
    if launcher != "basic":
        rule = f"must be basic with {KEY}, which trains its jobs in this process"
        raise RecipeError([f"hydra/launcher = {launcher}: {rule}"])
    recipes = {job.folder.name: job.recipe for job in jobs if job.recipe is not None}
    for name, recipe in recipes.items():
        problem = _find_obstacle(recipe)
        if problem is not None:
            raise RecipeError([f"{KEY}: job {name}: {problem}"])
    sharing = _tabulate(recipes)
    trunks = plan_trunks(sharing)
    if not trunks:
        rule = "jobs share steps if only their length or schedule differ, and only from a step on"
        raise RecipeError([f"{KEY}: no two of {len(jobs)} jobs share a step: {rule}"])
    return SharedSteps(sweeper, Path(str(sweeper.config.hydra.sweep.dir)), sharing, trunks)


def _find_obstacle(recipe: Recipe) -> str | None:
    """Return the problem of a job that can't be a fork of another with the same files."""
    train, checkpoint = recipe.train, recipe.checkpoint
    obstacles = {
        "train.callbacks: must be []": bool(train.callbacks),
        "train.features: must be []": bool(train.features),
        "run_features: must be []": bool(recipe.run_features),
        "privacy: must be null": recipe.privacy is not None,
        f"train.{train.deadline}: must be another length": train.deadline is not None,
        "train.sink_size = auto: must be a number": train.sink_size == "auto",
        "monitor.early_stop.metric: must be null": recipe.monitor.early_stop.metric is not None,
        "checkpoint.restore: must be null": checkpoint.restore is not None,
        "checkpoint.every_seconds: must be null": checkpoint.every_seconds is not None,
        "checkpoint.keep_minutes: must be null": checkpoint.keep_minutes is not None,
        "checkpoint.mirror: must be null": checkpoint.mirror is not None,
        "checkpoint.prefix: must be null": bool(checkpoint.prefix or checkpoint.directory),
        "dump.steps: must be null": recipe.dump.steps is not None,
        "profile.mode: must be off": recipe.profile.mode != "off",
        "launch: must be auto or none": recipe.launch.name not in ("auto", "none"),
        "stages: must have train and checkpoint": not {"train", "checkpoint"} <= {*recipe.stages},
    }
    return next((text for text, is_met in obstacles.items() if is_met), None)


def _tabulate(recipes: Mapping[str, Recipe]) -> dict[str, SharingJob]:
    """Return jobs with the learning rates of their updates; data are read once for equal keys."""
    steps_per_epoch: dict[str, int] = {}
    jobs = {}
    for name, recipe in recipes.items():
        digest = _hash_shared_keys(recipe)
        if digest not in steps_per_epoch:
            with Reporter() as reporter:
                dataset = declare_data(recipe, reporter) or load_data(recipe, reporter)
            steps_per_epoch[digest] = dataset.train_order.steps_per_epoch
        schedule = schedule_run(recipe.train, steps_per_epoch[digest])
        planned = count_total_steps(recipe.train, schedule.steps_per_epoch)
        rates = make_learning_rates(recipe.train, replace(schedule, total=planned))
        table = RateTable(rates, schedule.total)
        jobs[name] = SharingJob(recipe, table, schedule.steps_per_epoch, digest)
    return jobs


def _hash_shared_keys(recipe: Recipe) -> str:
    leaves = [
        [list(path), leaf]
        for path, leaf in iterate_leaves(recipe.model_dump(mode="json"))
        if not any(path[: len(prefix)] == prefix for prefix in RATE_PATHS)
    ]
    return hashlib.sha256(json.dumps(leaves).encode()).hexdigest()


@dataclass(eq=False)
class SharedSteps:
    """The trunks of a sweep, by which its jobs are started."""

    sweeper: BasicSweeper
    sweep_dir: Path
    jobs: Mapping[str, SharingJob]
    trunks: Sequence[Trunk]

    def __call__(self, jobs: Sequence[PlannedJob]) -> Sequence[JobReturn]:
        """Train trunks that jobs still need, begin the jobs as forks, and run them."""
        waiting = {job.folder.name for job in jobs if not (job.folder / RECIPE).exists()}
        done: dict[str, Path] = {}
        for trunk in self.trunks:
            if waiting & {*trunk.jobs} and (trunk.parent is None or trunk.parent in done):
                folder = self._train(trunk, done.get(str(trunk.parent)))
                if folder is not None:
                    done[trunk.name] = folder
        for job in jobs:
            last = self._find_last(job.folder.name, done)
            if last is not None and job.folder.name in waiting:
                self._begin(job, done[last.name], last.stop)
        returns = launch_jobs(self.sweeper, jobs)
        for job in jobs:
            self._remove_extra(job.folder)
        return returns

    def close(self) -> None:
        """Remove the trunks, once all jobs have ended."""
        shutil.rmtree(self.sweep_dir / SHARED, ignore_errors=True)

    def print_plan(self) -> None:
        """Print the steps of each trunk, and how many are saved."""
        alone = sum(job.table.total for job in self.jobs.values())
        saved = sum((trunk.stop - trunk.start) * (len(trunk.jobs) - 1) for trunk in self.trunks)
        text = f"{len(self.jobs)} jobs of {count_noun(alone, 'step')} in all"
        print(f"\nshare      {text}: {alone - saved:,} are trained, {saved:,} saved", flush=True)
        for trunk in self.trunks:
            names = join_first(list(trunk.jobs), MAX_NAMED)
            print(f"           steps {trunk.start + 1:,} to {trunk.stop:,} once for jobs {names}")

    def _train(self, trunk: Trunk, parent: Path | None) -> Path | None:
        """Train a trunk, or wait until another process has; None if it fails, as its jobs will."""
        folder = self.sweep_dir / SHARED / trunk.name
        folder.mkdir(parents=True, exist_ok=True)
        job = self.jobs[trunk.jobs[0]]
        train = job.recipe.train.model_copy(update={"end_step": trunk.stop})
        recipe = train_in_one_process(job.recipe.model_copy(update={"train": train}))
        with lock_file(folder / CLAIM, wait=True):
            if read_status(folder) != "done":
                print(f"\nshared steps {trunk.start + 1:,} to {trunk.stop:,}", flush=True)
                if not (folder / RECIPE).exists() and parent is not None:
                    _write(folder, self._fork(parent, trunk.start, recipe, job))
                resume = str(folder) if (folder / RECIPE).exists() else None
                train = recipe.train.model_copy(update={"resume": resume})
                options = RunOptions(run_dir=folder, how_to_resume=lambda *_: None)
                try:
                    run(recipe.model_copy(update={"train": train}), options)
                except PipelineError as error:
                    print(f"warning: shared steps failed: {error}", flush=True)
            status = read_status(folder)
        if status == "stopped":
            raise KeyboardInterrupt
        return folder if status == "done" else None

    def _find_last(self, name: str, done: Mapping[str, Path]) -> Trunk | None:
        """Return the trunk with the most steps of a job; None if there is none."""
        trunks = [trunk for trunk in self.trunks if name in trunk.jobs and trunk.name in done]
        return max(trunks, key=lambda trunk: trunk.stop, default=None)

    def _begin(self, job: PlannedJob, origin: Path, step: int) -> None:
        """Make a job's directory a fork, unless another process has claimed it."""
        with claim_job(job.folder) as is_claimed:
            if is_claimed and not (job.folder / RECIPE).exists():
                sharing = self.jobs[job.folder.name]
                recipe = train_in_one_process(sharing.recipe)
                _write(job.folder, self._fork(origin, step, recipe, sharing))

    def _fork(self, origin: Path, step: int, recipe: Recipe, job: SharingJob) -> Fork:
        evaluates = is_evaluation_due(recipe, job.steps_per_epoch, step)
        return Fork(origin, step, recipe, (), evaluates)

    def _remove_extra(self, folder: Path) -> None:
        """Remove the checkpoint with which a done job began, if it wouldn't have one alone."""
        job = self.jobs.get(folder.name)
        if job is None or read_status(folder) != "done":
            return
        starts = {trunk.stop for trunk in self.trunks if folder.name in trunk.jobs}
        for step in starts & {*list_saved_steps(folder / FOLDER)}:
            if not job.is_saved(step) and step < job.table.total:
                remove_checkpoint(make_checkpoint_path(folder / FOLDER, step))


def _write(folder: Path, fork: Fork) -> None:
    """Write a fork over what a killed process has left of one."""
    for name in APPENDED:
        (folder / name).unlink(missing_ok=True)
    shutil.rmtree(folder / FOLDER, ignore_errors=True)
    process: Mapping[str, Any] = read_provenance(fork.origin)[-1]
    copy_fork(folder, fork, process)
