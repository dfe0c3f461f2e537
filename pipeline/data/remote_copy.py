"""Copies of remote files in the cache: made once, by fsspec, and read offline afterwards.

A copy is complete once it has its list of checksums, SHA256SUMS, against which it is verified each
time. An address of a file may end in #sha256=DIGEST, which the file must have. Braces make a series
of files: https://host/train-{000..009}.tar.
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
from pipeline.core.files.address import Address
from pipeline.core.files.atomic_write import commit, write_whole
from pipeline.core.files.bounded_read import read_json, read_text
from pipeline.core.files.braces import expand_braces
from pipeline.core.files.storage import Storage, StoredFile, open_storage, retry
from pipeline.core.files.value_text import format_bytes, show
from pipeline.data.checksums import SUMS, compute_checksum, format_checksums
from pipeline.data.download import lock_data_folder

FOLDER = "remote"
"""Folder of the cache that has the copies."""
FILE = "file"
TREE = "tree"
"""Folders of a copy, which has either a file or a tree of files."""
LISTING = "listing.json"
"""Sizes and versions of the remote files when the copy began."""
PIN = "sha256="
"""Beginning of the part of an address after #."""
MOST_LISTING_BYTES = 1 << 30
"""Size limit of `LISTING` and of the list of checksums."""
Select = Callable[[Sequence[str]], str]
"""Names of the files of a folder -> the one to copy. Raises ValueError if none fits."""
Sources = Mapping[str, str]
"""Names of files at an address by their names in the copy; "" is the address itself."""


def copy_once(address: Address, cache: Path, select: Select | None = None) -> Path:
    """Return the local copy of a remote file or folder, or of the file that `select` chooses.

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
    """Raise DataError unless a complete copy has its checksums."""
    advice = f"remove {folder} to copy it again"
    try:
        sums = read_text(folder / SUMS, MOST_LISTING_BYTES)
        names = [line.partition("  ")[2] for line in sums.splitlines()]
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
    _require_copyable(address, listing, folder)
    _fetch(storage, listing, content, sources or {})
    if retry(partial(_list_remote, storage, sources)) != listing:
        raise DataError(f"{address}: has changed while it was copied; run this again")
    names = [f"{content.name}/{name}" for name in sorted(listing)]
    if pin and (digest := compute_checksum(folder / names[0])) != pin.removeprefix(PIN).lower():
        (folder / names[0]).unlink()
        problem = "the file has changed, or the address is wrong"
        raise DataError(f"{address}: has SHA-256 {digest}; {problem}")
    write_whole(folder / SUMS, format_checksums(folder, names))
    size_bytes = sum((folder / name).stat().st_size for name in names)
    count = f"{len(names):,} file{'s' if len(names) > 1 else ''}"
    print(printable(f"{address}: {count}, {format_bytes(size_bytes)}, copied to {folder}"))


def _find_sources(location: str, select: Select | None) -> tuple[Storage, Sources | None]:
    """Return the storage of an address, and its files to copy; None: all files of a folder. Raises
    ValueError for too many files, and if `select` finds none."""
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


def _require_copyable(address: Address, listing: Mapping[str, StoredFile], folder: Path) -> None:
    """Raise DataError without files or for names that lead elsewhere, RunError for a full disk."""
    if not listing:
        raise DataError(f"{address}: there is no such file or folder, or it is empty")
    for name in listing:
        path = PurePosixPath(name)
        if path.is_absolute() or ".." in path.parts or str(path) != name or "\n" in name:
            raise DataError(f"{address}: has a file {show(name)}, which can't be copied")
    size_bytes = sum(file.size_bytes or 0 for file in listing.values())
    free_bytes = shutil.disk_usage(folder).free
    if size_bytes > free_bytes:
        sizes = f"{format_bytes(size_bytes)}, and {folder} has room for {format_bytes(free_bytes)}"
        raise RunError(f"{address}: has {sizes}; set another cache folder with cache.root=DIR")


def _fetch(
    storage: Storage, listing: Mapping[str, StoredFile], content: Path, sources: Sources
) -> None:
    """Copy the files of a listing that an interrupted copy of the same versions lacks."""
    record = content.with_name(LISTING)
    versions = {name: list(astuple(file)) for name, file in listing.items()}
    previous: Any = None
    with suppress(OSError, ValueError):
        previous = read_json(record, MOST_LISTING_BYTES)
    previous = previous if isinstance(previous, dict) else {}
    for path in [path for path in content.rglob("*") if path.is_file()]:
        name = path.relative_to(content).as_posix()
        has_version = name in listing and listing[name].version
        if not has_version or previous.get(name) != versions[name]:
            path.unlink()
    write_whole(record, json.dumps(versions))
    for name, file in listing.items():
        path = content / name
        if path.exists():
            continue
        path.parent.mkdir(parents=True, exist_ok=True)
        draft = content.with_name(f"{content.name}.part")
        retry(partial(storage.download, sources.get(name, name), draft))
        size_bytes = draft.stat().st_size
        if file.size_bytes not in (None, size_bytes):
            sizes = f"{size_bytes:,} of {file.size_bytes:,} bytes"
            raise RunError(f"{storage.url}: {name}: only {sizes} arrived")
        commit(draft, path)
