"""The manifest of a checkpoint: its files with their sizes and SHA-256, and the recipe's digest.

It is written when all files are there and before the folder gets its name, so a folder without one
isn't a sound checkpoint.
"""

from __future__ import annotations

import hashlib
import json
import os
import time
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from itertools import chain
from pathlib import Path
from typing import Any

from pipeline.checkpoint.checkpoint_folder import HOST, JSON, LOST, MANIFEST, METRICS, RECIPE, STATE
from pipeline.core.errors import DataError, PipelineError, RunError
from pipeline.core.files import bounded_read

DESCRIPTION = "_METADATA"
"""File of `STATE` in which orbax lists the arrays."""
REQUIRED_FILES = (f"{STATE}/{DESCRIPTION}", f"{HOST}/{JSON}", f"{RECIPE}/{JSON}")
"""Files that every manifest lists."""
LATE_METRICS = f"{METRICS}/{METRICS}"
"""File that may be added to a sealed checkpoint: the metrics by which the best is chosen."""
HASHING_THREADS = 2
"""Files that are read and hashed at once; hashing takes 0.6 s a GB and is done beside training."""
MOST_JSON_BYTES = 64 << 20
SAVED_AT = "saved_at"
"""Key of a manifest: seconds since 1970, the same in a copy of the folder."""


class DamagedError(DataError):
    """A checkpoint that is not as it was written; the text names the file and the fault."""


def unreadable(file: Path, error: OSError) -> PipelineError:
    """Return the error for a file that the system doesn't read: DamagedError if its content or its
    name is lost, else RunError. A process without descriptors or rights damages nothing."""
    reason = f"{file}: can't be read: {error.strerror}"
    if error.errno in LOST:
        return DamagedError(reason)
    return RunError(f"{reason}; its checkpoint may be sound and stays as it is")


def write_manifest(folder: Path, recipe_digest: str) -> None:
    """Seal a checkpoint whose files are all there."""
    listed = _files(folder)
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        files = dict(zip(listed, threads.map(_entry, listed.values()), strict=True))
    manifest = {"recipe": recipe_digest, "files": files, SAVED_AT: time.time()}
    (folder / MANIFEST).write_text(json.dumps(manifest, indent=1), encoding="utf-8")


def verify(folder: Path) -> None:
    """Read every file and compare it with the manifest.

    Raises DamagedError for the first file that is missing, not listed, or not as it was written,
    and RunError as `unreadable` does.
    """
    with ThreadPoolExecutor(HASHING_THREADS) as threads:
        # In the order of the manifest, so the first of several faults is named.
        for _ in threads.map(_verify_file, *zip(*_match_entries(folder), strict=True)):
            pass


def _verify_file(file: Path, entry: Mapping[str, Any]) -> None:
    try:
        entry_now = _entry(file)
    except OSError as error:
        raise unreadable(file, error) from error
    _compare_sizes(file, entry_now["bytes"], entry)
    if entry_now != entry:
        raise DamagedError(f"{file}: is not what was written, by its SHA-256")


def require_complete(folder: Path) -> None:
    """Check that every file of a sealed checkpoint is there with its size; none is read.

    Raises DamagedError, and RunError as `unreadable` does.
    """
    for file, entry in _match_entries(folder):
        try:
            size_bytes = file.stat().st_size
        except OSError as error:
            raise unreadable(file, error) from error
        _compare_sizes(file, size_bytes, entry)


def read_json(file: Path) -> Any:
    """Read a JSON file of a checkpoint. Raises DamagedError if it is damaged, and RunError as
    `unreadable` does."""
    try:
        return bounded_read.read_json(file, MOST_JSON_BYTES)
    except OSError as error:
        raise unreadable(file, error) from error
    except ValueError as error:
        raise DamagedError(f"{file}: is no JSON: {error}") from error


def _match_entries(folder: Path) -> list[tuple[Path, Mapping[str, Any]]]:
    """Return the files of a checkpoint with their entries; there must be no others."""
    entries = _read_entries(folder / MANIFEST)
    try:
        files = _files(folder)
    except OSError as error:
        raise unreadable(Path(error.filename or folder), error) from error
    for name in entries:
        if name not in files:
            raise DamagedError(f"{folder / name}: is missing")
    for name in files:
        if name not in entries and name != LATE_METRICS:
            raise DamagedError(f"{folder / name}: is not listed in {MANIFEST}")
    return [(folder / name, entry) for name, entry in entries.items()]


def _compare_sizes(file: Path, found_bytes: int, entry: Mapping[str, Any]) -> None:
    if found_bytes != entry["bytes"]:
        raise DamagedError(f"{file}: has {found_bytes:,} bytes, not {entry['bytes']}")


def _read_entries(file: Path) -> Mapping[str, Mapping[str, Any]]:
    match read_json(file):
        case {"recipe": str(), "files": dict(entries)} if all(map(_is_entry, entries.values())):
            pass
        case _:
            raise DamagedError(f"{file}: is no manifest of a checkpoint")
    for name in REQUIRED_FILES:
        if name not in entries:
            raise DamagedError(f"{file}: does not list {name}")
    return entries


def _is_entry(entry: Any) -> bool:
    match entry:
        case {"bytes": int(), "sha256": str(), **others}:
            return not others
    return False


def _files(folder: Path) -> dict[str, Path]:
    """Return the files of a checkpoint by path.

    Raises DamagedError for a link and for anything but a regular file; OSError if a folder can't be
    listed, which `Path.rglob` would treat as empty.
    """
    files = {}

    def fail(error: OSError) -> None:
        raise error

    walked = os.walk(folder, onerror=fail)
    paths = (Path(parent, name) for parent, *names in walked for name in chain.from_iterable(names))
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


def _entry(file: Path) -> dict[str, Any]:
    with file.open("rb") as content:
        digest = hashlib.file_digest(content, "sha256").hexdigest()
        return {"bytes": content.tell(), "sha256": digest}
