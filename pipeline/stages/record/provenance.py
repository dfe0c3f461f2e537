"""provenance.json: the origin of a run besides its recipe.

It has the command, code, versions, machine, settings and data of every process that worked on the
run. A resumed run adds a process.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError, get_system_reason
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json

PROVENANCE = "provenance.json"


@dataclass(frozen=True)
class Provenance:
    """The origin of that part of a run that one process has computed."""

    begun: str
    """Start of the process, ISO 8601 with the offset of its time zone."""
    command: str
    folder: str
    """Working directory, in which relative paths of the recipe begin."""
    seed: int
    """The recipe's seed."""
    code: Mapping[str, Any]
    versions: Mapping[str, str]
    machine: Mapping[str, Any]
    settings: Mapping[str, str]
    """Environment variables."""
    data: Mapping[str, Any]
    """Fingerprints of columns by split."""
    plugins: Mapping[str, Any] = field(default_factory=dict)
    """Versions and SHA-256 of the files of plug-ins, by module."""
    numerics: Mapping[str, Any] = field(default_factory=dict)
    """Values of jax's settings that decide numbers."""


def add_provenance(run_dir: Path, process: Provenance) -> None:
    """Append a process to the earlier processes of the run."""
    try:
        earlier = read_provenance(run_dir)
    except DataError:
        # A damaged file doesn't stop the run. It is replaced.
        earlier = []
    processes = [*earlier, asdict(process)]
    write_whole(run_dir / PROVENANCE, format_json({"processes": processes}, indent=2) + "\n")


def read_provenance(run_dir: Path) -> Sequence[Mapping[str, Any]]:
    """Read the processes that worked on a run, oldest first; [] without the file.

    Raises DataError for a damaged file.
    """
    file = run_dir / PROVENANCE
    try:
        tree = read_json(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(
            f"{file}: can't be read: {get_system_reason(error)}; delete it to continue without it"
        ) from error
    processes = tree.get("processes") if isinstance(tree, dict) else None
    if not isinstance(processes, list) or not all(isinstance(item, dict) for item in processes):
        raise DataError(f"{file}: must hold a list of processes; delete it to continue without it")
    return processes
