"""What a sweep's directory holds, and what that says of its jobs.

Files are all that the processes of a sweep share. A job's directory holds `overrides.yaml` (what
sets it apart) beside what every run directory holds. Whoever runs a job locks the file `.claim` in
there; the kernel frees the lock of a process that dies, so a claim needs no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, RootModel, ValidationError

from pipeline.config.overrides import value_of
from pipeline.errors import SUCCEEDED, DataError, listed
from pipeline.files.atomic_write import write_whole
from pipeline.files.error_text import describe
from pipeline.files.folder_lock import LOCK, locked_file
from pipeline.files.safe_yaml import parse_yaml, read_yaml, yaml_text
from pipeline.runner.record.run_directory import (
    CLAIM,
    OVERRIDES,
    RECIPE,
    SUMMARY,
    read_status,
    written_at_ns,
)

JOURNAL, JOURNAL_LOCK, BEATS = "study.log", "study.log.lock", ".beats"
"""What is there of a study: Optuna's journal, its lock, and a file for each trial's heart."""
Kept = TypeVar("Kept", bound=BaseModel)


@contextmanager
def claimed(job_dir: Path) -> Iterator[bool]:
    """Keep other processes from a job; false, at once, where another is at it."""
    with locked_file(job_dir / CLAIM, wait=False) as lock:
        yield lock is not None


@contextmanager
def alone(sweep_dir: Path) -> Iterator[None]:
    """Wait until no other process plans in this sweep, and keep them waiting meanwhile."""
    with locked_file(sweep_dir / LOCK, wait=True):
        yield


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


def is_finished(job_dir: Path, failures: Mapping[str, int]) -> bool:
    """Is nothing left to do about a job?

    What failed is tried again by the next command: `failures` are those that this one found, which
    are tried once more, by whoever comes first.
    """
    status = read_status(job_dir)
    if status != "failed":
        return status in SUCCEEDED
    written_ns = written_at_ns(job_dir / SUMMARY)
    # Removed meanwhile: by whoever is trying it again.
    return written_ns != 0 and written_ns != failures.get(job_dir.name)


def values_of(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """What overrides make of keys, as YAML reads it; the text itself where that is no YAML."""
    return {key: _value(value_of(overrides, key) or "null") for key in keys}


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def write_overrides(job_dir: Path, changed: Mapping[str, Any]) -> None:
    """Keep what sets a job apart."""
    write_whole(job_dir / OVERRIDES, yaml_text(dict(changed)))


def read_overrides(job_dir: Path) -> dict[str, Any] | None:
    """What sets a job apart; None where there is no job. Raises DataError as `read_kept` does."""
    changed = read_kept(job_dir / OVERRIDES, read_yaml, RootModel[dict[str, Any]])
    return None if changed is None else changed.root


def read_kept(file: Path, read: Callable[[Path], Any], kind: type[Kept]) -> Kept | None:
    """What a file of a sweep holds; None where there is none, or nothing in it.

    `read` raises OSError and ValueError, this DataError; that also where it holds something else.
    """
    try:
        tree = read(file)
    except FileNotFoundError:
        return None
    except (OSError, ValueError) as error:
        reason = error.strerror if isinstance(error, OSError) else error
        raise DataError(f"{file}: can't be read: {reason}") from error
    if tree is None:
        return None
    if not isinstance(tree, dict):
        raise DataError(f"{file}: must hold a section of keys")
    try:
        return kind.model_validate(tree)
    except ValidationError as error:
        raise DataError(f"{file}: {'; '.join(listed(describe(error, tree)))}") from error


def find_jobs(sweep_dir: Path) -> list[Path]:
    """The directories of the jobs there are, in order."""
    folders = (file.parent for file in sweep_dir.glob(f"*/{OVERRIDES}"))
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))
