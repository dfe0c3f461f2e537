"""Command of a sweep, stored in its directory, and the search for the sweep of a command."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from omegaconf import OmegaConf
from pydantic import BaseModel, ConfigDict, ValidationError

from pipeline.config.defaults import mark_optional_keys
from pipeline.config.overrides import hide_secret_values
from pipeline.core.errors import DataError, RecipeError, hide_secrets_in_tree
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.error_text import describe_problems
from pipeline.core.files.safe_yaml import read_yaml
from pipeline.core.files.yaml_text import format_yaml
from pipeline.stages.record.run_directory import OUTPUTS, read_written_at_ns
from pipeline.study.sweep.directory import read_model

COMMAND = "sweep.yaml"
# fmt: off
VARIABLE_SETTINGS = frozenset((
    "_target_", "_recursive_", "trial", "n_trials", "n_jobs", "max_batch_size", "heartbeat_s",
    "max_retry", "storage", "history", "warmup_share", "vectorize", "share", "pairs", "minutes",
))
# fmt: on
"""Settings in which the commands of one sweep may differ. They aren't stored, since `storage` may
have a password."""


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
