"""The manifest of a checkpoint: its files with their sizes and SHA-256, and the recipe's digest.

The manifest is the last file that is written before a draft is renamed to a checkpoint, so a folder
without a manifest isn't a sound checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import HOST, LOST, MANIFEST, META, METRICS, RECIPE, STATE
from pipeline.core.errors import DataError, PipelineError, RunError
from pipeline.core.files import bounded_read

DESCRIPTION = "_METADATA"
"""File of `STATE` in which orbax lists the arrays."""
REQUIRED_FILES = (f"{STATE}/{DESCRIPTION}", f"{HOST}/{META}", f"{RECIPE}/{META}")
"""Files that every manifest lists."""
LATE_METRICS = f"{METRICS}/{METRICS}"
"""File of metrics, which may be added to a sealed checkpoint."""
HASHING_THREADS = 2
"""Number of files that are hashed at once, while training continues. Hashing takes 0.6 s a GB."""
MOST_JSON_BYTES = 64 << 20
"""Largest JSON file of a checkpoint that is read."""
SAVED_AT = "saved_at"
"""Key of a manifest for the time of saving, in seconds since 1970."""


class DamagedError(DataError):
    """A checkpoint has changed since it was written. The message names the file and the fault."""


def make_read_error(file: Path, error: OSError) -> PipelineError:
    """Return the error for a file that the system can't read.

    It is a DamagedError if the file is missing or the disk can't read it. Else it is a RunError:
    the process may lack descriptors or rights, and the file may be sound.
    """
    reason = f"{file}: can't be read: {error.strerror}"
    if error.errno in LOST:
        return DamagedError(reason)
    return RunError(f"{reason}; its checkpoint may be sound and stays as it is")


def write_manifest(folder: Path, recipe_digest: str) -> None:
    """Seal a complete checkpoint with a manifest."""
    paths = _list_files(folder)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        files = dict(zip(paths, threads.map(describe_file, paths.values()), strict=True))
    manifest = {"recipe": recipe_digest, "files": files, SAVED_AT: time.time()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def verify_files(folder: Path) -> None:
    """Read all files of a checkpoint and compare them with the manifest.

    Raises DamagedError for the first file that is missing, isn't listed or has changed, and
    RunError as in `make_read_error`.
    """
    entries = _match_entries(folder)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        # Iterating raises the errors, in the order of the manifest.
        for _ in threads.map(_verify_file, entries.keys(), entries.values()):
            pass


def _verify_file(file: Path, entry: Mapping[str, Any]) -> None:
    try:
        current_entry = describe_file(file)
    except OSError as error:
        raise make_read_error(file, error) from error
    _compare_sizes(file, current_entry["bytes"], entry)
    if current_entry != entry:
        raise DamagedError(f"{file}: its SHA-256 doesn't match the manifest")


def require_complete(folder: Path) -> None:
    """Verify the names and sizes of files, without reading them. Raises as `verify_files` does."""
    for file, entry in _match_entries(folder).items():
        try:
            size_bytes = file.stat().st_size
        except OSError as error:
            raise make_read_error(file, error) from error
        _compare_sizes(file, size_bytes, entry)


def describe_files(folder: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the entries of all files of a checkpoint.

    Entries of the manifest itself and of late metrics, which it can't list, are computed. Raises
    DamagedError, RunError as in `make_read_error`, and OSError for the manifest and late metrics.
    """
    entries = _match_entries(folder)
    for file in (folder / LATE_METRICS, folder / MANIFEST):
        if file not in entries and file.is_file():
            entries[file] = describe_file(file)
    return entries


def read_json(file: Path) -> Any:
    """Read a JSON file of a checkpoint. Raises DamagedError if it isn't JSON, and the errors of
    `make_read_error`."""
    try:
        return bounded_read.read_json(file, MOST_JSON_BYTES)
    except OSError as error:
        raise make_read_error(file, error) from error
    except ValueError as error:
        raise DamagedError(f"{file}: must be JSON: {error}") from error


def _match_entries(folder: Path) -> dict[Path, Mapping[str, Any]]:
    """Return the files that the manifest of a checkpoint lists, with their entries. Raises
    DamagedError if a file is missing or isn't listed, and the errors of `make_read_error`."""
    entries = _read_entries(folder / MANIFEST)
    try:
        files = _list_files(folder)
    except OSError as error:
        raise make_read_error(Path(error.filename or folder), error) from error
    for name in entries:
        if name not in files:
            raise DamagedError(f"{folder / name}: is missing")
    for name in files:
        if name not in entries and name != LATE_METRICS:
            raise DamagedError(f"{folder / name}: isn't listed in {MANIFEST}")
    return {folder / name: entry for name, entry in entries.items()}


def _compare_sizes(file: Path, size_bytes: int, entry: Mapping[str, Any]) -> None:
    if size_bytes != entry["bytes"]:
        raise DamagedError(f"{file}: has {size_bytes:,} bytes, not {entry['bytes']:,}")


def _read_entries(file: Path) -> Mapping[str, Mapping[str, Any]]:
    """Read a manifest, and return its entries by path. Raises DamagedError."""
    match read_json(file):
        case {"recipe": str(), "files": dict(entries)} if all(map(is_entry, entries.values())):
            pass
        case _:
            raise DamagedError(f"{file}: must be the manifest of a checkpoint")
    for name in REQUIRED_FILES:
        if name not in entries:
            raise DamagedError(f"{file}: doesn't list {name}")
    return entries


def is_entry(entry: Any) -> bool:
    """Return whether a value of JSON is an entry of a manifest."""
    match entry:
        case {"bytes": int(), "sha256": str(), **others}:
            return not others
    return False


def _list_files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by path in it, without the manifest.

    Raises DamagedError for a link and for a file that isn't regular; OSError if a folder can't be
    listed, which `Path.rglob` would treat as empty.
    """

    def fail(error: OSError) -> None:
        raise error

    files = {}
    paths = [
        Path(parent, name)
        for parent, folder_names, file_names in os.walk(folder, onerror=fail)
        for name in (*folder_names, *file_names)
    ]
    for path in sorted(paths):
        name = path.relative_to(folder).as_posix()
        if path.is_symlink():
            raise DamagedError(f"{path}: is a link")
        if path.is_dir() or name == MANIFEST:
            continue
        if not path.is_file():
            raise DamagedError(f"{path}: must be a regular file")
        files[name] = path
    return files


def describe_file(file: Path) -> dict[str, Any]:
    """Return the entry of a manifest for a file. Raises OSError."""
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        # All of it has been read, so this is the size of the bytes that were hashed.
        return {"bytes": content.tell(), "sha256": digest}
