"""Running the jobs of a sweep until all are finished, by this process or by others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from hydra.core.utils import JobReturn, JobStatus
from hydra.plugins.launcher import Launcher

from pipeline.config.hydra_versions import BasicLauncher
from pipeline.core.errors import RunError, printable, printable_lines
from pipeline.study.sweep.directory import is_finished, is_held
from pipeline.study.sweep.plan import PlannedJob
from pipeline.study.sweep.threads import share_processors

POLL_S = 0.5
"""Interval of looking whether other processes have ended their jobs."""
STARTS = 3
"""Starts in a row without any finished job after which the launcher is taken for broken."""

Launch = Callable[[Sequence[PlannedJob]], Sequence[JobReturn]]


def run_all(jobs: Sequence[PlannedJob], failures: Mapping[str, int], launch: Launch) -> None:
    """Run jobs until all are finished, by this process or by others.

    A job of a dead process is free again, and is started here. Raises RunError when repeated starts
    finish no job: the launcher doesn't work.
    """
    futile = 0
    waiting = False
    while left := _find_unfinished(jobs, failures):
        free = [job for job in left if not is_held(job.folder)]
        if not free:
            if not waiting:
                print(f"\nwaiting for other processes, at jobs {_names(left)}", flush=True)
            waiting = True
            time.sleep(POLL_S)
            continue
        waiting = False
        reason = _try(launch, free)
        lost = [job for job in _find_unfinished(free, failures) if not is_held(job.folder)]
        futile = futile + 1 if len(lost) == len(free) else 0
        if futile == STARTS:
            ended = f"started {STARTS} times, and ended each time {reason}"
            raise RunError(f"jobs {_names(lost)}: {ended}")


def _find_unfinished(jobs: Sequence[PlannedJob], failures: Mapping[str, int]) -> list[PlannedJob]:
    return [job for job in jobs if not is_finished(job.folder, failures)]


def _names(jobs: Sequence[PlannedJob]) -> str:
    return printable(", ".join(job.folder.name for job in jobs))


def _try(launch: Launch, jobs: Sequence[PlannedJob]) -> str:
    """Launch jobs and return how that ended, in words: a launcher's workers may be killed."""
    try:
        for job in launch(jobs):
            if job.status == JobStatus.FAILED:
                # Reading the value raises the error that Hydra has caught.
                job.return_value  # noqa: B018
    except Exception as error:
        reason = f"with {type(error).__name__}: {error}".splitlines()[0]
        print(printable_lines(f"warning: a launch ended {reason}"), file=sys.stderr)
        return reason
    return "without a word"


def launch(
    launcher: Launcher, max_batch_size: int | None, jobs: Sequence[PlannedJob]
) -> list[JobReturn]:
    """Have a launcher start jobs, at most `max_batch_size` at once, and wait for them.

    A sequential launcher gets single jobs, so that each has its number.
    """
    size = 1 if isinstance(launcher, BasicLauncher) else max_batch_size or len(jobs)
    config = getattr(launcher, "config", None)
    settings: Mapping[str, Any] = {} if config is None else config.hydra.launcher
    returns: list[JobReturn] = []
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        placed = [job.launch_overrides for job in batch]
        with share_processors(settings, len(batch)):
            returns += launcher.launch(placed, initial_job_idx=batch[0].number)
    return returns
