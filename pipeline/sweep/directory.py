"""What a sweep's directory holds, and what that says of its jobs.

Files are all that the processes of a sweep share. A job's directory holds `overrides.yaml` (what
sets it apart) beside what every run directory holds. Whoever runs a job locks the file `.claim` in
there; the kernel frees the lock of a process that dies, so a claim needs no clock.
"""

from __future__ import annotations

import fcntl
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import yaml

from pipeline.run_directory import OUTPUTS, RECIPE, SUMMARY, read_status, written_at_ns
from pipeline.whole_file import write_whole

COMMAND, OVERRIDES, CLAIM, PLAN_LOCK = "sweep.yaml", "overrides.yaml", ".claim", ".lock"
FINAL = frozenset({"done", "pruned"})
"""What a job has become for good; one that failed is tried again by the next command."""


@contextmanager
def claimed(job_dir: Path) -> Iterator[bool]:
    """Keep other processes from a job; false, at once, where another is at it."""
    with (job_dir / CLAIM).open("a") as file:
        yield lock(file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)


@contextmanager
def alone(sweep_dir: Path) -> Iterator[None]:
    """Wait until no other process plans in this sweep, and keep them waiting meanwhile."""
    with (sweep_dir / PLAN_LOCK).open("a") as file:
        lock(file.fileno(), fcntl.LOCK_EX)
        yield


def lock(descriptor: int, how: int) -> bool:
    """Lock an open file until it is closed; false where another process has it.

    Where the file system has no locks, nothing keeps a second process out.
    """
    try:
        fcntl.flock(descriptor, how)
    except BlockingIOError:
        return False
    except OSError:
        pass
    return True


def is_held(job_dir: Path) -> bool:
    """Is a process at this job?"""
    if not (job_dir / CLAIM).exists():
        return False
    with claimed(job_dir) as free:
        return not free


def read_state(job_dir: Path) -> str:
    """The status in a job's summary; without one: running, interrupted or waiting."""
    status = read_status(job_dir)
    if status is not None:
        return status
    if is_held(job_dir):
        return "running"
    return "interrupted" if (job_dir / RECIPE).exists() else "waiting"


def find_failures(sweep_dir: Path) -> dict[str, int]:
    """The jobs that have failed so far, by name, with the time of their summary in ns."""
    summaries = sweep_dir.glob(f"*/{SUMMARY}")
    failed = (file for file in summaries if read_status(file.parent) == "failed")
    return {file.parent.name: written_at_ns(file) for file in failed}


def is_settled(job_dir: Path, failures: Mapping[str, int]) -> bool:
    """Is nothing left to do about a job?

    `failures` are those that this command found: they are tried once more, by whoever comes first.
    """
    status = read_status(job_dir)
    if status != "failed":
        return status in FINAL
    written_ns = written_at_ns(job_dir / SUMMARY)
    # Removed meanwhile: by whoever is trying it again.
    return written_ns != 0 and written_ns != failures.get(job_dir.name)


def write_overrides(job_dir: Path, changed: Mapping[str, Any]) -> None:
    """Keep what sets a job apart."""
    write_whole(job_dir / OVERRIDES, yaml.safe_dump(dict(changed), sort_keys=False))


def read_overrides(job_dir: Path) -> dict[str, Any] | None:
    """What sets a job apart; None where there is no job."""
    try:
        return yaml.safe_load((job_dir / OVERRIDES).read_text(encoding="utf-8"))
    except FileNotFoundError:
        return None


def find_jobs(sweep_dir: Path) -> list[Path]:
    """The directories of the jobs there are, in order."""
    folders = (file.parent for file in sweep_dir.glob(f"*/{OVERRIDES}"))
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))


def write_command(sweep_dir: Path, overrides: Sequence[str]) -> None:
    """Keep what a sweep was asked for, unless it is there."""
    if not (sweep_dir / COMMAND).exists():
        text = yaml.safe_dump({"overrides": list(overrides)}, sort_keys=False)
        write_whole(sweep_dir / COMMAND, text)


def read_command(sweep_dir: Path) -> Sequence[str] | None:
    """What a sweep was asked for; None where nothing says so."""
    try:
        return yaml.safe_load((sweep_dir / COMMAND).read_text(encoding="utf-8"))["overrides"]
    except (OSError, ValueError, TypeError, KeyError, yaml.YAMLError):
        return None


def find_sweep(overrides: Sequence[str], outputs: Path = OUTPUTS) -> Path | None:
    """The directory of the newest sweep that was asked for the same."""
    sweeps = sorted(outputs.glob(f"*/*/{COMMAND}"), key=written_at_ns)
    same = (file.parent for file in reversed(sweeps) if read_command(file.parent) == overrides)
    return next(same, None)
