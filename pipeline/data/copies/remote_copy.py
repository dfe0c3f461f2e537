"""Copies of remote files in the cache: made once, by fsspec, and read offline afterwards.

The list of checksums, SHA256SUMS, is written last, so a copy with it is complete. A later run
verifies the copy by it. The address of a file may end in #sha256=DIGEST, the checksum that the file
must have. An address with braces is a series of files: https://host/train-{000..009}.tar.
"""

from __future__ import annotations

import hashlib
import json
import shutil
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import astuple
from functools import partial
from pathlib import Path, PurePosixPath
from typing import Any
from urllib.parse import unquote, urlsplit

from pipeline.core.errors import DataError, RunError, printable
from pipeline.core.files.atomic_write import commit, write_whole
from pipeline.core.files.bounded_read import read_json, read_text
from pipeline.core.files.braces import expand_braces
from pipeline.core.files.paths import Address
from pipeline.core.files.storage import Storage, StoredFile, open_storage, retry
from pipeline.core.files.value_text import format_bytes, show
from pipeline.data.copies.checksums import SUMS, compute_checksum, format_checksums
from pipeline.data.copies.download import lock_data_folder

FOLDER = "remote"
"""Name of the cache's folder with the copies."""
FILE = "file"
TREE = "tree"
"""Name of the folder in a copy that has its one file, or its tree of files."""
LISTING = "listing.json"
"""Name of the file with sizes and versions of the remote files when the copy began."""
PIN = "sha256="
"""The text before the digest in the part of an address after #."""
MOST_LISTING_BYTES = 1 << 30
"""Size limit of `LISTING` and of the list of checksums."""
Select = Callable[[Sequence[str]], str]
"""Function that takes the names of the files of a folder, and returns the name of the file to copy.
Raises ValueError if none fits."""
Sources = Mapping[str, str]
"""Names of the remote files, relative to the address, by their names in the copy. The name of a
file that the address itself names is ""."""


def copy_once(address: Address, cache: Path, select: Select | None = None) -> Path:
    """Return the path of the local copy of a remote file or folder. Of a folder, `select` chooses
    the file to copy; None: all files.

    Of several processes one copies and the others wait for it. An interrupted copy is continued.
    Raises DataError if the copy or the remote file has changed, and for a wrong address; RunError
    if the address can't be reached.
    """
    folder = find_copy_folder(address, cache, select)
    with lock_data_folder(folder):
        if not (folder / SUMS).exists():
            _copy(address, folder, select)
        else:
            _verify(address, folder)
    files = list((folder / FILE).glob("*"))
    return files[0] if files else folder / TREE


def find_copy_folder(address: Address, cache: Path, select: Select | None = None) -> Path:
    """Return the folder of the cache for the copy of an address."""
    text = f"{address} {'' if select is None else select.__name__}"
    return cache / FOLDER / hashlib.sha256(text.encode()).hexdigest()[:32]


def _verify(address: Address, folder: Path) -> None:
    """Raise DataError if the files of a complete copy don't have their checksums."""
    advice = f"remove {folder} to copy it again"
    try:
        sums = read_text(folder / SUMS, MOST_LISTING_BYTES)
        # A name may have other ends of lines than "\n".
        names = [line.partition("  ")[2] for line in sums.split("\n")[:-1]]
        is_same = bool(names) and format_checksums(folder, names) == sums
    except (OSError, ValueError) as error:
        raise DataError(
            f"{folder}: the copy of {address} can't be read: {error}; {advice}"
        ) from error
    if not is_same:
        raise DataError(f"{folder}: the copy of {address} has changed; {advice}")


def _copy(address: Address, folder: Path, select: Select | None) -> None:
    """Copy the files of an address, and list their checksums."""
    location, _, pin = str(address).partition("#")
    try:
        storage, sources = _find_sources(location, select)
    except ValueError as error:
        raise DataError(f"{address}: {error}") from error
    is_file = sources is not None and "" in sources.values()
    if pin and not (is_file and pin.startswith(PIN)):
        raise DataError(f"{address}: must have no #, or be a file and end in #{PIN}DIGEST")
    content = folder / (FILE if is_file else TREE)
    listing = retry(partial(_list_remote, storage, sources))
    _require_copyable(address, listing)
    _fetch(storage, listing, content, sources or {})
    if retry(partial(_list_remote, storage, sources)) != listing:
        raise DataError(f"{address}: has changed while it was copied; run this again")
    names = [f"{content.name}/{name}" for name in sorted(listing)]
    if pin:
        digest = compute_checksum(folder / names[0])
        if digest != pin.removeprefix(PIN).lower():
            (folder / names[0]).unlink()
            raise DataError(
                f"{address}: has SHA-256 {digest}; the file has changed, or the address is wrong"
            )
    write_whole(folder / SUMS, format_checksums(folder, names))
    size_bytes = sum((folder / name).stat().st_size for name in names)
    count = f"{len(names):,} file{'s' if len(names) > 1 else ''}"
    print(printable(f"{address}: {count}, {format_bytes(size_bytes)}, copied to {folder}"))


def _find_sources(location: str, select: Select | None) -> tuple[Storage, Sources | None]:
    """Return the storage of an address, and the files to copy from it; None: all files of a folder.
    Raises ValueError for braces that make too many files, and if `select` chooses none."""
    path, _, query = location.partition("?")
    folder, _, last = path.rpartition("/")
    names = expand_braces(last)
    if names != [last]:
        if query:
            raise ValueError("must have no query, since braces make it a series of files")
        return open_storage(folder), dict(zip(names, names, strict=True))
    storage = open_storage(location)
    is_file = location.startswith("http") or retry(storage.is_file)  # http has no folders
    if not is_file:
        if select is None:
            return storage, None
        storage = open_storage(f"{location}/{select(list(retry(storage.list_files)))}")
    name = PurePosixPath(unquote(urlsplit(storage.url).path)).name
    return storage, {name or "file": ""}


def _list_remote(storage: Storage, sources: Sources | None) -> Mapping[str, StoredFile]:
    """Return descriptions of the files to copy, by their names in the copy."""
    if sources is None:
        return storage.list_files()
    return {name: storage.describe(source) for name, source in sources.items()}


def _require_copyable(address: Address, listing: Mapping[str, StoredFile]) -> None:
    """Raise DataError without files, or for a name that leads out of the folder."""
    if not listing:
        raise DataError(f"{address}: there is no such file or folder, or it is empty")
    for name in listing:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\n" in name:
            raise DataError(f"{address}: has a file {show(name)}, which can't be copied")


def _fetch(
    storage: Storage, listing: Mapping[str, StoredFile], content: Path, sources: Sources
) -> None:
    """Copy the files of a listing into `content`. Files of an interrupted copy stay if their remote
    versions are the same; others are removed first. Raises RunError if the disk has too little room
    for the files to copy."""
    listing_file = content.with_name(LISTING)
    versions = {name: list(astuple(file)) for name, file in listing.items()}
    previous_versions: Any = {}
    with suppress(OSError, ValueError):
        previous_versions = read_json(listing_file, MOST_LISTING_BYTES)
    if not isinstance(previous_versions, dict):
        previous_versions = {}
    for path in list(content.rglob("*")):
        if not path.is_file():
            continue
        name = path.relative_to(content).as_posix()
        has_version = name in listing and listing[name].version
        if not has_version or previous_versions.get(name) != versions[name]:
            path.unlink()
    write_whole(listing_file, json.dumps(versions))
    missing = {name: file for name, file in listing.items() if not (content / name).exists()}
    missing_bytes = sum(file.size_bytes or 0 for file in missing.values())
    free_bytes = shutil.disk_usage(content.parent).free
    if missing_bytes > free_bytes:
        raise RunError(
            f"{storage.url}: has {format_bytes(missing_bytes)} to copy, and {content.parent} has "
            f"room for {format_bytes(free_bytes)}; set another cache folder with cache.root=DIR"
        )
    for name, file in missing.items():
        path = content / name
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = content.with_name(f"{content.name}.part")
        retry(partial(storage.download, sources.get(name, name), draft))
        size_bytes = draft.stat().st_size
        if file.size_bytes not in (None, size_bytes):
            raise RunError(
                f"{storage.url}: {name}: {size_bytes:,} bytes arrived instead of "
                f"{file.size_bytes:,}"
            )
        commit(draft, path)
