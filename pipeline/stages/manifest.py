"""The manifest of a checkpoint: its files with their sizes and SHA-256, and the recipe's digest.

It is written when all files are there and before the folder gets its name, so that a checkpoint
without one is none; but for those of versions that wrote none, which have no recipe in them either.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from pipeline import bounded_file
from pipeline.differences import leaves
from pipeline.errors import DataError
from pipeline.run_directory import decides

MANIFEST = "manifest.json"
UNLISTED = frozenset({MANIFEST, "_CHECKPOINT_METADATA", "commit_success.txt"})
"""What comes behind the manifest, at the top: orbax writes it and nothing reads it."""
MOST_JSON_BYTES = 64 << 20


class DamagedError(DataError):
    """A checkpoint that is not as it was written; names the file and what is wrong with it."""


def write_manifest(folder: Path, recipe: Mapping[str, Any]) -> None:
    """Seal a checkpoint whose files are all there; `recipe` is the one that is trained."""
    files = {name: _entry(file) for name, file in _files(folder).items()}
    manifest = {"recipe": recipe_digest(recipe), "files": files}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def verify(folder: Path) -> None:
    """Read every file and hold it against the manifest.

    Raises DamagedError for the first file that is missing or not as it was written.
    """
    entries = _read_entries(folder / MANIFEST)
    files = _files(folder)
    for name, entry in entries.items():
        if name not in files:
            raise DamagedError(f"{folder / name}: is missing")
        try:
            found = _entry(files[name])
        except OSError as error:
            raise DamagedError(f"{folder / name}: can't be read: {error.strerror}") from error
        if found["bytes"] != entry["bytes"]:
            raise DamagedError(
                f"{folder / name}: has {found['bytes']:,} bytes, not {entry['bytes']}"
            )
        if found != entry:
            raise DamagedError(f"{folder / name}: is not what was written, by its SHA-256")


def read_json(file: Path) -> Any:
    """A JSON file of a checkpoint. Raises DamagedError where it is none."""
    try:
        return bounded_file.read_json(file, MOST_JSON_BYTES)
    except OSError as error:
        raise DamagedError(f"{file}: can't be read: {error.strerror}") from error
    except ValueError as error:
        raise DamagedError(f"{file}: is no JSON: {error}") from error


def recipe_digest(recipe: Mapping[str, Any]) -> str:
    """SHA-256 over the keys of a resolved recipe that decide the numbers of a run."""
    deciding = {json.dumps(where): leaf for where, leaf in leaves(recipe) if decides(where)}
    return hashlib.sha256(json.dumps(deciding, sort_keys=True).encode()).hexdigest()


def _read_entries(file: Path) -> Mapping[str, Mapping[str, Any]]:
    match read_json(file):
        case {"recipe": str(), "files": dict(entries)} if all(
            isinstance(entry, dict) and entry.keys() == {"bytes", "sha256"}
            for entry in entries.values()
        ):
            return entries
    raise DamagedError(f"{file}: is no manifest of a checkpoint")


def _files(folder: Path) -> dict[str, Path]:
    """The files of a checkpoint by path. Raises DamagedError for a link, which means another."""
    found = {}
    for path in sorted(folder.rglob("*")):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise DamagedError(f"{path}: is a link")
        if path.is_file() and name not in UNLISTED:
            found[name] = path
    return found


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return {"bytes": content.tell(), "sha256": digest}
