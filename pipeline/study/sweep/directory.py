"""The files of a sweep's directory, and the state of its jobs that they give.

The processes of a sweep share only files. A job's directory holds `overrides.yaml` (the keys that
differ from other jobs) and the files of every run directory. The process that runs a job locks the
file `.claim` in there; the kernel releases the lock of a dead process, so a claim needs no clock.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, TypeVar

from pydantic import BaseModel, RootModel, ValidationError

from pipeline.config.overrides import value_of, without_secret_values
from pipeline.core.errors import SUCCEEDED, DataError, listed
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.bounded_read import read_text
from pipeline.core.files.error_text import describe
from pipeline.core.files.folder_lock import LOCK, locked_file
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml, parse_yaml, yaml_text
from pipeline.stages.record.run_directory import (
    CLAIM,
    OVERRIDES,
    RECIPE,
    SUMMARY,
    read_status,
    written_at_ns,
)

JOURNAL, JOURNAL_LOCK, BEATS = "study.log", "study.log.lock", ".beats"
"""Files of a study: Optuna's journal, its lock, and the folder of heartbeat files."""
Kept = TypeVar("Kept", bound=BaseModel)


@contextmanager
def claimed(job_dir: Path) -> Iterator[bool]:
    """Claim a job against other processes; false, without waiting, where another runs it."""
    with locked_file(job_dir / CLAIM, wait=False) as lock:
        yield lock is not None


@contextmanager
def alone(sweep_dir: Path) -> Iterator[None]:
    """Hold the sweep's planning lock, waiting for other processes."""
    with locked_file(sweep_dir / LOCK, wait=True):
        yield


def is_held(job_dir: Path) -> bool:
    """Return whether a process is running this job."""
    if not (job_dir / CLAIM).exists():
        return False
    with claimed(job_dir) as free:
        return not free


def read_state(job_dir: Path) -> str:
    """The status in a job's summary, or, without one, running, interrupted or waiting."""
    status = read_status(job_dir)
    if status is not None:
        return status
    if is_held(job_dir):
        return "running"
    return "interrupted" if (job_dir / RECIPE).exists() else "waiting"


def find_failures(sweep_dir: Path) -> dict[str, int]:
    """Failed jobs by name, with the time of their summary in ns since the epoch."""
    summaries = sweep_dir.glob(f"*/{SUMMARY}")
    failed = (file for file in summaries if read_status(file.parent) == "failed")
    return {file.parent.name: written_at_ns(file) for file in failed}


def is_finished(job_dir: Path, failures: Mapping[str, int]) -> bool:
    """Return whether a job needs no further run.

    The next command retries failed jobs: `failures` are those that failed before this command
    started, which are retried once, by whichever process comes first.
    """
    status = read_status(job_dir)
    if status != "failed":
        return status in SUCCEEDED
    written_ns = written_at_ns(job_dir / SUMMARY)
    # 0: removed meanwhile by the process that is retrying it.
    return written_ns != 0 and written_ns != failures.get(job_dir.name)


def values_of(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """The values that overrides give to keys, without passwords, parsed as YAML; invalid YAML stays
    a text."""
    shown = without_secret_values(overrides)
    return {key: _value(value_of(shown, key) or "null") for key in keys}


def _value(text: str) -> Any:
    try:
        return parse_yaml(text)
    except ValueError:
        return text


def write_overrides(job_dir: Path, changed: Mapping[str, Any]) -> None:
    """Write the keys that distinguish a job, with their values."""
    write_whole(job_dir / OVERRIDES, yaml_text(dict(changed)))


def read_overrides(job_dir: Path) -> dict[str, Any] | None:
    """The keys that distinguish a job; None where there is no job. Raises as `read_kept` does."""
    changed = read_kept(job_dir / OVERRIDES, _read_written, RootModel[dict[str, Any]])
    return None if changed is None else changed.root


def _read_written(file: Path) -> Any:
    return parse_written_yaml(read_text(file, MAX_BYTES))


def read_kept(file: Path, read: Callable[[Path], Any], kind: type[Kept]) -> Kept | None:
    """Read and validate a file of a sweep; None where it is missing or empty.

    `read` parses the file and raises OSError and ValueError. Raises DataError where the file can't
    be read or does not fit `kind`.
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
    """The directories of all jobs, in order."""
    folders = (file.parent for file in sweep_dir.glob(f"*/{OVERRIDES}"))
    return sorted(folders, key=lambda folder: (len(folder.name), folder.name))
