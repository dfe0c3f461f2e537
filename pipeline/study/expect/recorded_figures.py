"""Recorded figures of a recipe: the file `expected/NAME.json` in the recipe's folder.

A record holds the processor and the versions whose bits it has.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from pipeline.core.errors import DataError, RunError, get_system_reason
from pipeline.core.files.atomic_write import format_json, write_whole
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.error_text import validate_file
from pipeline.stages.record.provenance import read_provenance

FOLDER = "expected"
DECIDING = ("jax", "jaxlib", "flax", "optax", "numpy")
"""Packages whose versions decide bits."""


@dataclass(frozen=True)
class BitsOrigin:
    """Processor, versions and settings, which decide the bits of a run of a recipe and its code."""

    processor: str
    """The processor, its instructions and cores."""
    device: str
    versions: str
    settings: str
    """Variables of the environment, empty without those that change numbers."""

    def describe_difference(self, other: BitsOrigin) -> str | None:
        """Return what the other origin has instead; None if they are equal."""
        ours, others = asdict(self), asdict(other)
        changes = [f"{key} {others[key] or 'none'}" for key in ours if ours[key] != others[key]]
        return ", ".join(changes) or None


class _Record(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    origin: BitsOrigin
    figures: dict[str, float]


class _Records(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")

    records: list[_Record]


def read_origin(run_dir: Path) -> BitsOrigin | None:
    """Return the origin of a run; None without provenance. Raises DataError for a damaged file."""
    processes = read_provenance(run_dir)
    if not processes:
        return None
    process = processes[0]
    machine = _section(process, "machine")
    versions = _section(process, "versions")
    return BitsOrigin(
        processor=f"{machine.get('processor')}, {machine.get('instructions')}",
        device=str(machine.get("device")),
        versions=", ".join(f"{name} {versions.get(name)}" for name in DECIDING),
        settings=" ".join(f"{key}={value}" for key, value in _section(process, "settings").items()),
    )


def _section(process: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    section = process.get(key)
    return section if isinstance(section, Mapping) else {}


def find_file(recipe_file: Path) -> Path:
    """Return the path of the recorded figures of a recipe."""
    return recipe_file.parent / FOLDER / f"{recipe_file.stem}.json"


def read_records(recipe_file: Path) -> list[tuple[BitsOrigin, Mapping[str, float]]]:
    """Return the recorded figures by origin; [] without a file. Raises DataError for a bad one."""
    file = find_file(recipe_file)
    try:
        tree = read_json(file)
    except FileNotFoundError:
        return []
    except (OSError, ValueError) as error:
        raise DataError(f"{file}: can't be read: {get_system_reason(error)}") from error
    if not isinstance(tree, dict):
        raise DataError(f"{file}: must hold a section of keys")
    return [(item.origin, item.figures) for item in validate_file(_Records, tree, file).records]


def write_record(recipe_file: Path, origin: BitsOrigin, figures: Mapping[str, float]) -> Path:
    """Write the figures of an origin, and keep other origins'. Raises RunError if it fails."""
    file = find_file(recipe_file)
    records = [(o, f) for o, f in read_records(recipe_file) if o != origin]
    records.append((origin, figures))
    tree = {"records": [{"origin": asdict(o), "figures": dict(f)} for o, f in records]}
    try:
        file.parent.mkdir(exist_ok=True)
        write_whole(file, format_json(tree, indent=2) + "\n")
    except OSError as error:
        raise RunError(f"{file}: can't be written: {error.strerror}") from error
    return file
