"""The jobs of a sweep as its command describes them, and having them run until all are settled."""

from __future__ import annotations

import copy
import os
import sys
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from hydra.core.config_loader import ConfigLoader
from hydra.core.hydra_config import HydraConfig
from hydra.core.utils import JobReturn, JobStatus
from omegaconf import DictConfig, open_dict, read_write

from pipeline.config.compose import check
from pipeline.config.recipe import Recipe
from pipeline.errors import RecipeError, RunError
from pipeline.run_directory import RECIPE, changed_keys
from pipeline.sweep.directory import (
    alone,
    find_jobs,
    is_held,
    is_settled,
    read_command,
    read_overrides,
    write_command,
    write_overrides,
)

POLL_S = 0.5
"""How often to look whether other processes have ended their jobs."""
STARTS = 3
"""So often in a row may jobs be started without one of them being settled by it."""


@dataclass(frozen=True)
class PlannedJob:
    """A job: its number in the sweep, its directory, all its overrides and what sets it apart."""

    number: int
    folder: Path
    overrides: tuple[str, ...]
    changed: Mapping[str, Any]
    recipe: Recipe | None
    """None where the overrides make no recipe: the job will say so."""

    @property
    def placed(self) -> list[str]:
        """The overrides as a launcher takes them, naming the directory."""
        name = self.folder.name.replace("'", r"\'")
        return [*self.overrides, f"hydra.sweep.subdir='{name}'"]

    def with_override(self, override: str) -> PlannedJob:
        """The job with one override more."""
        return replace(self, overrides=(*self.overrides, override))


def compose_job(
    loader: ConfigLoader,
    sweep: DictConfig,
    number: int,
    overrides: Sequence[str],
    changed: Mapping[str, Any],
) -> PlannedJob:
    """The job that overrides make of a sweep's configuration.

    Raises what Hydra does of overrides that can't be composed.
    """
    config = loader.load_sweep_config(sweep, list(overrides))
    with open_dict(config):
        config.hydra.job.id = config.hydra.job.num = number
    folder = Path(str(config.hydra.sweep.dir)) / str(config.hydra.sweep.subdir)
    before = HydraConfig.instance().cfg
    HydraConfig.instance().set_config(config)
    try:
        recipe = check(_without_hydra(config), overrides)
    except RecipeError:
        recipe = None
    finally:
        HydraConfig.instance().cfg = before
    return PlannedJob(number, folder, tuple(overrides), changed, recipe)


def _without_hydra(config: DictConfig) -> DictConfig:
    task = copy.deepcopy(config)
    with read_write(task), open_dict(task):
        del task["hydra"]
    return task


def enter(
    sweep_dir: Path, jobs: Sequence[PlannedJob], command: Sequence[str], *, grows: bool = True
) -> None:
    """Put jobs into the sweep's directory, where they may be already, and what was asked for.

    A sweep that `grows` may have more jobs than it had; else jobs come one by one, and it must be
    the same that is asked for.

    Raises RunError where the directory holds another sweep, RecipeError where two jobs would have
    the same directory or one that lies elsewhere.
    """
    _check_folders(sweep_dir, jobs)
    sweep_dir.mkdir(parents=True, exist_ok=True)
    with alone(sweep_dir):
        problems = _disagreements(sweep_dir, jobs) if grows else _other(sweep_dir, jobs, command)
        if problems:
            more = f"; and {len(problems) - 3} more" if len(problems) > 3 else ""
            told = "; ".join(problems[:3])
            raise RunError(
                f"{sweep_dir}: holds another sweep: {told}{more}; name another directory"
            )
        write_command(sweep_dir, command)
        for job in jobs:
            job.folder.mkdir(exist_ok=True)
            if read_overrides(job.folder) is None:
                write_overrides(job.folder, job.changed)


def _check_folders(sweep_dir: Path, jobs: Sequence[PlannedJob]) -> None:
    times = Counter(job.folder for job in jobs)
    wrong = [folder for folder in times if times[folder] > 1 or folder.parent != sweep_dir]
    if wrong:
        name = os.path.relpath(wrong[0], sweep_dir)
        rule = "each job needs a folder of its own, right in the sweep's directory"
        raise RecipeError([f"hydra.sweep.subdir = {name}: {rule}"])


def _disagreements(sweep_dir: Path, jobs: Sequence[PlannedJob]) -> list[str]:
    """Where the jobs in a directory are not the ones planned."""
    planned = {job.folder.name: job for job in jobs}
    problems = []
    for folder in find_jobs(sweep_dir):
        if folder.name in planned:
            problems += _differences(planned[folder.name])
        else:
            told = _told(read_overrides(folder) or {})
            problems.append(f"job {folder.name} there ({told}) is none of this one")
    return problems


def _other(sweep_dir: Path, jobs: Sequence[PlannedJob], command: Sequence[str]) -> list[str]:
    """Where a directory's command is not the one given, or a job not the one planned."""
    there = read_command(sweep_dir)
    if there is None or list(there) == list(command):
        return [problem for job in jobs for problem in _differences(job)]
    gone = [f"{override} is not asked for here" for override in there if override not in command]
    return gone + [f"{override} was not asked for" for override in command if override not in there]


def _differences(job: PlannedJob) -> list[str]:
    """How a job differs from the one that its directory holds, if any."""
    there = read_overrides(job.folder)
    if there is not None and there != job.changed:
        return [f"job {job.folder.name} there has {_told(there)}, here {_told(job.changed)}"]
    if job.recipe is None or not (job.folder / RECIPE).exists():
        return []
    lines = changed_keys(job.recipe, job.folder)
    return [f"job {job.folder.name}: {line.partition(';')[0]}" for line in lines]


def _told(changed: Mapping[str, Any]) -> str:
    return ", ".join(f"{key}={value}" for key, value in changed.items()) or "nothing"


Launch = Callable[[Sequence[PlannedJob]], Sequence[JobReturn]]


def run_all(jobs: Sequence[PlannedJob], failures: Mapping[str, int], launch: Launch) -> None:
    """Have jobs run until all are settled, by this process or by others.

    A job of a process that died is free again, and is started here. Raises RunError when starting
    jobs settles none of them again and again: the launcher doesn't work.
    """
    futile, waiting = 0, False
    while left := _unsettled(jobs, failures):
        free = [job for job in left if not is_held(job.folder)]
        if not free:
            if not waiting:
                print(f"\nwaiting for other processes, at jobs {_names(left)}", flush=True)
            waiting = True
            time.sleep(POLL_S)
            continue
        waiting, reason = False, _try(launch, free)
        lost = [job for job in _unsettled(free, failures) if not is_held(job.folder)]
        futile = futile + 1 if len(lost) == len(free) else 0
        if futile == STARTS:
            ended = f"started {STARTS} times, and ended each time {reason}"
            raise RunError(f"jobs {_names(lost)}: {ended}")


def _unsettled(jobs: Sequence[PlannedJob], failures: Mapping[str, int]) -> list[PlannedJob]:
    return [job for job in jobs if not is_settled(job.folder, failures)]


def _names(jobs: Sequence[PlannedJob]) -> str:
    return ", ".join(job.folder.name for job in jobs)


def _try(launch: Launch, jobs: Sequence[PlannedJob]) -> str:
    """Launch jobs; what went wrong, if the launcher says so: its workers may have been killed."""
    try:
        for job in launch(jobs):
            if job.status == JobStatus.FAILED:
                # What Hydra has caught; asking for the value raises it.
                job.return_value  # noqa: B018
    except Exception as error:
        reason = f"with {type(error).__name__}: {error}".splitlines()[0]
        print(f"warning: a launch ended {reason}", file=sys.stderr)
        return reason
    return "without a word"
