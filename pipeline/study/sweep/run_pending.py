"""Execution of a sweep's jobs until all are finished, by this process or by others."""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import redirect_stderr
from io import StringIO
from typing import Any

from hydra.core.utils import JobReturn, JobStatus

from pipeline.config.hydra_versions import BasicLauncher, BasicSweeper
from pipeline.config.overrides import quote_value
from pipeline.core.errors import PipelineError, RunError, printable, printable_lines
from pipeline.study.sweep.directory import is_finished, is_held
from pipeline.study.sweep.plan import PlannedJob
from pipeline.study.sweep.threads import share_processors

POLL_S = 0.5
"""Seconds between two checks whether other processes have finished their jobs."""
MAX_FUTILE_STARTS = 3
"""Successive starts without a finished job after which the launcher counts as broken."""

Launch = Callable[[Sequence[PlannedJob]], Sequence[JobReturn]]
"""Function that starts jobs, and returns when they have ended."""


def run_all(jobs: Sequence[PlannedJob], failures: Mapping[str, int], launch: Launch) -> None:
    """Run jobs until all are finished, by this process or by others.

    Jobs of dead processes are started again. Raises RunError if the launcher seems broken, since
    repeated starts finish no job, and the PipelineError of a launch, for example of a full disk.
    """
    futile_starts = 0
    is_waiting = False
    while unfinished := _find_unfinished(jobs, failures):
        free = [job for job in unfinished if not is_held(job.folder)]
        if not free:
            if not is_waiting:
                names = _join_names(unfinished)
                print(f"\nwaiting for other processes, which run jobs {names}", flush=True)
            is_waiting = True
            time.sleep(POLL_S)
            continue
        is_waiting = False
        reason = _try_launch(launch, free)
        lost = [job for job in _find_unfinished(free, failures) if not is_held(job.folder)]
        futile_starts = futile_starts + 1 if len(lost) == len(free) else 0
        if futile_starts == MAX_FUTILE_STARTS:
            ended = f"started {MAX_FUTILE_STARTS} times, and ended each time {reason}"
            raise RunError(f"jobs {_join_names(lost)}: {ended}")


def _find_unfinished(jobs: Sequence[PlannedJob], failures: Mapping[str, int]) -> list[PlannedJob]:
    return [job for job in jobs if not is_finished(job.folder, failures)]


def _join_names(jobs: Sequence[PlannedJob]) -> str:
    return printable(", ".join(job.folder.name for job in jobs))


def _try_launch(launch: Launch, jobs: Sequence[PlannedJob]) -> str:
    """Launch jobs, whose processes may be killed, and return how the launch ended, as text.

    Raises only a PipelineError of the launch.
    """
    try:
        for job in launch(jobs):
            if job.status == JobStatus.FAILED:
                # Reading the value raises the job's error, after Hydra has printed its overrides.
                with redirect_stderr(StringIO()):
                    job.return_value  # noqa: B018
    except PipelineError:
        raise
    except Exception as error:
        reason = f"with {type(error).__name__}: {error}".splitlines()[0]
        print(printable_lines(f"warning: a launch ended {reason}"), file=sys.stderr)
        return reason
    return "without an error"


def launch_jobs(sweeper: BasicSweeper, jobs: Sequence[PlannedJob]) -> list[JobReturn]:
    """Start jobs by the sweeper's launcher, at most `max_batch_size` at once, and wait for them.

    Hydra's basic launcher gets one job at a time, so that each has its number.
    """
    launcher = sweeper.launcher
    assert launcher is not None
    size = 1 if isinstance(launcher, BasicLauncher) else sweeper.max_batch_size or len(jobs)
    config = getattr(launcher, "config", None)
    settings: Mapping[str, Any] = {} if config is None else config.hydra.launcher
    returns: list[JobReturn] = []
    for start in range(0, len(jobs), size):
        batch = jobs[start : start + size]
        overrides = [
            [*job.overrides, f"hydra.sweep.subdir={quote_value(job.folder.name)}"] for job in batch
        ]
        with share_processors(settings, len(batch)):
            returns += launcher.launch(overrides, initial_job_idx=batch[0].number)
    return returns
