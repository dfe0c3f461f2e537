"""Files of a sweep's directory: its command, and the states of its jobs.

The sweep of a command is searched for by the stored command.

The processes of a sweep share only files. A job's directory is a run directory that also has
`overrides.yaml`, with the keys that distinguish the job. The process that runs a job locks its file
`.claim`. The kernel releases the lock when the process dies, so that claims needn't time out.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from math import isfinite
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, Field, RootModel, ValidationError

from pipeline.config.defaults import mark_optional_keys
from pipeline.config.overrides import hide_secret_values, value_of
from pipeline.core.errors import (
    SUCCEEDED,
    DataError,
    RecipeError,
    get_exit_status,
    hide_secrets_in_tree,
)
from pipeline.core.files.atomic_write import LOCK, lock_file, write_whole
from pipeline.core.files.bounded_read import read_json, read_text
from pipeline.core.files.error_text import Model, describe_problems, validate_file
from pipeline.core.files.safe_yaml import MAX_BYTES, parse_written_yaml, parse_yaml, read_yaml
from pipeline.core.files.yaml_text import format_yaml
from pipeline.stages.record.run_directory import (
    CLAIM,
    OUTPUTS,
    OVERRIDES,
    RECIPE,
    SUMMARY,
    read_status,
    read_written_at_ns,
)

JOURNAL = "study.log"
"""Optuna's journal of a study."""
JOURNAL_LOCK = "study.log.lock"
BEATS = ".beats"
"""Folder of a study's heartbeat files."""
COMMAND = "sweep.yaml"
# fmt: off
VARIABLE_SETTINGS = frozenset((
    "_target_", "_recursive_", "trial", "n_trials", "n_jobs", "max_batch_size", "heartbeat_s",
    "max_retry", "storage", "history", "warmup_share", "vectorize", "share", "pairs", "minutes",
))
# fmt: on
"""Settings in which the commands of one sweep may differ. They aren't stored, since `storage` may
have a password."""


@contextmanager
def claim_job(job_dir: Path) -> Iterator[bool]:
    """Claim a job during the body. Yields False if another process has claimed it."""
    with lock_file(job_dir / CLAIM, wait=False) as lock:
        yield lock is not None


@contextmanager
def hold_planning_lock(sweep_dir: Path) -> Iterator[None]:
    """Hold the sweep's planning lock, waiting for other processes."""
    with lock_file(sweep_dir / LOCK, wait=True):
        yield


def is_held(job_dir: Path) -> bool:
    """Return whether a process is running this job."""
    if not (job_dir / CLAIM).exists():
        return False
    with claim_job(job_dir) as is_claimed:
        return not is_claimed


def read_state(job_dir: Path) -> str:
    """Return the status in a job's summary; without a summary running, interrupted or waiting."""
    status = read_status(job_dir)
    if status is not None:
        return status
    if is_held(job_dir):
        return "running"
    return "interrupted" if (job_dir / RECIPE).exists() else "waiting"


def find_failures(sweep_dir: Path) -> dict[str, int]:
    """Return the failed jobs by name, with the time of their summary in ns since the epoch."""
    summaries = sweep_dir.glob(f"*/{SUMMARY}")
    failed = (file for file in summaries if read_status(file.parent) == "failed")
    return {file.parent.name: read_written_at_ns(file) for file in failed}


def is_finished(job_dir: Path, failures: Mapping[str, int]) -> bool:
    """Return whether a job needs no further run.

    `failures` are the jobs that failed before this command started, by `find_failures`. Each is
    retried once, by the first process that claims it.
    """
    status = read_status(job_dir)
    if status != "failed":
        return status in SUCCEEDED
    written_ns = read_written_at_ns(job_dir / SUMMARY)
    # The time is 0 if a process that retries the job has removed its summary meanwhile.
    return written_ns not in (0, failures.get(job_dir.name))


def read_values(overrides: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    """Return the values of keys in overrides, parsed as YAML, or as texts if they aren't valid.

    Passwords are removed, and a missing key has the value None.
    """
    redacted = hide_secret_values(overrides)
    values: dict[str, Any] = {}
    for key in keys:
        text = value_of(redacted, key) or "null"
        try:
            values[key] = parse_yaml(text)
        except ValueError:
            values[key] = text
    return values


def format_changed(changed: Mapping[str, Any]) -> str:
    """Return the keys that distinguish a job, with their values, as one line."""
    return ", ".join(f"{key}={value}" for key, value in changed.items())


def write_overrides(job_dir: Path, changed: Mapping[str, Any]) -> None:
    """Write the keys that distinguish a job, with their values."""
    write_whole(job_dir / OVERRIDES, format_yaml(dict(changed)))


def read_overrides(job_dir: Path) -> dict[str, Any] | None:
    """Return the keys that distinguish a job, with their values; None without a job.

    Raises DataError if the file can't be read.
    """

    def read(file: Path) -> Any:
        return parse_written_yaml(read_text(file, MAX_BYTES))

    changed = read_model(job_dir / OVERRIDES, read, RootModel[dict[str, Any]])
    return None if changed is None else changed.root


def read_model(file: Path, read: Callable[[Path], Any], kind: type[Model]) -> Model | None:
    """Read and validate a file of a sweep; None if it is missing or empty.

    `read` parses the file, and may raise OSError and ValueError. Raises DataError if the file can't
    be read or isn't valid for `kind`.
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
        raise DataError(f"{file}: must hold keys and values")
    return validate_file(kind, tree, file)


class Modelled(BaseModel):
    """Figures that an emulated device's model predicts, for the table."""

    model_config = ConfigDict(frozen=True)

    sink_size: int | None = None
    step_ms: float | None = None
    samples_per_s: float | None = None
    bound: str | None = None


class Times(BaseModel):
    """Times of a run, for the table."""

    model_config = ConfigDict(frozen=True)

    step_ms: float | None = None
    train_s: float | None = None


class JobSummary(BaseModel):
    """The result of a job."""

    model_config = ConfigDict(frozen=True)

    status: str
    reason: str | None = None
    exit_status: int | None = None
    steps: int | None = None
    metrics: dict[str, Any] = Field(default_factory=dict)
    time: Times = Times()
    modelled: Modelled = Modelled()

    @property
    def exits_with(self) -> int:
        """Exit status of the job's command; 1 for a job that has not ended."""
        return get_exit_status(self.status) if self.exit_status is None else self.exit_status

    def metric(self, name: str) -> float | None:
        """Return a metric as a number: the macro average if it has a value per class."""
        value = self.metrics.get(name)
        value = value.get("macro") if isinstance(value, dict) else value
        return float(value) if isinstance(value, int | float) else None

    def numbers(self) -> dict[str, float]:
        """Return the metrics with finite numbers by name."""
        values = {name: self.metric(name) for name in self.metrics}
        return {name: v for name, v in values.items() if v is not None and isfinite(v)}


def read_summary(job_dir: Path) -> JobSummary | None:
    """Read the result of a job; None without a summary. Raises DataError if it can't be read."""
    return read_model(job_dir / SUMMARY, read_json, JobSummary)


class Sweeper(BaseModel):
    """A sweeper, with the settings that decide its jobs."""

    model_config = ConfigDict(frozen=True, extra="allow")

    name: str | None = None
    """Name of the choice `hydra/sweeper`; None in the directory of an older version."""
    params: dict[str, Any] | None = None


class Command(BaseModel):
    """The command of a sweep; sweeps with equal commands are the same sweep."""

    model_config = ConfigDict(frozen=True)

    overrides: tuple[str, ...]
    """Overrides of the recipe, as typed."""
    sweeper: Sweeper = Sweeper()

    @property
    def arguments(self) -> list[str]:
        """All arguments of the jobs, fixed or swept: the overrides and the sweeper's `params`."""
        params = self.sweeper.params or {}
        marked = mark_optional_keys(f"{key}={value}" for key, value in params.items())
        return [*self.overrides, *marked]

    def redact(self) -> Command:
        """Return the command without secrets, for storing and comparing."""
        tree = hide_secrets_in_tree(self.model_dump(mode="json"))
        overrides = tuple(hide_secret_values(self.overrides))
        return Command.model_validate({**tree, "overrides": overrides})


def make_command(hydra_config: Any, overrides: Sequence[str]) -> Command:
    """Build the command from a recipe's overrides and the composed section `hydra`.

    Raises OmegaConfBaseException if a setting of the sweeper refers to a missing key, and
    RecipeError if its `params` are invalid.
    """
    section = resolve_sweeper(hydra_config)
    settings = {key: value for key, value in section.items() if key not in VARIABLE_SETTINGS}
    settings["name"] = hydra_config.runtime.choices["hydra/sweeper"]
    if settings["name"] == "grid" and "Nop" in str(settings.get("pruner")):
        del settings["pruner"]  # as in the directories of grids that can't have one
    try:
        return Command(overrides=tuple(overrides), sweeper=Sweeper.model_validate(settings))
    except ValidationError as error:
        problems = describe_problems(error, settings)
        raise RecipeError([f"hydra.sweeper.{problem}" for problem in problems]) from error


def resolve_sweeper(hydra_config: Any) -> dict[str, Any]:
    """Return the sweeper's settings, resolved. Raises OmegaConfBaseException for a missing key."""
    section = OmegaConf.to_container(hydra_config.sweeper, resolve=True)
    assert isinstance(section, dict)
    return {str(key): value for key, value in section.items()}


def write_command(sweep_dir: Path, command: Command) -> None:
    """Write the command of a sweep if it has changed, for example if a grid has grown.

    Raises DataError if the existing file can't be read.
    """
    redacted = command.redact()
    if read_command(sweep_dir) != redacted:
        write_whole(sweep_dir / COMMAND, format_yaml(redacted.model_dump(mode="json")))


def read_command(sweep_dir: Path) -> Command | None:
    """Read the command of a sweep; None without a file. Raises DataError if it can't be read."""
    return read_model(sweep_dir / COMMAND, read_yaml, Command)


def find_sweep(command: Command, besides: Path | None = None) -> Path | None:
    """Return the directory of the newest sweep of a command, other than `besides`.

    Sweeps that can't be read are skipped.
    """
    files = sorted(OUTPUTS.glob(f"*/*/{COMMAND}"), key=read_written_at_ns, reverse=True)
    folders = (file.parent for file in files if file.parent != besides)
    return next((folder for folder in folders if _has_command(folder, command)), None)


def _has_command(sweep_dir: Path, command: Command) -> bool:
    try:
        return read_command(sweep_dir) == command.redact()
    except DataError:
        return False
