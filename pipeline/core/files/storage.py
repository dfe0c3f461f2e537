"""Listing, reading, writing and removing of files at an address, by fsspec.

Errors of all file systems become DataError if another attempt can't succeed, else RunError.
"""

from __future__ import annotations

import importlib
import logging
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

from pipeline.core.errors import DataError, PipelineError, RunError, first_line

INSTALL = "pip install 'recipe-pipeline[storage]'"
REFUSED = (401, 403)
"""HTTP's statuses for requests with missing or wrong credentials."""
WAITS_S = (1.0, 2.0, 4.0)
"""Seconds before each further attempt of an action that failed."""
LOGGERS = ("aiobotocore", "botocore", "fsspec", "gcsfs", "huggingface_hub", "s3fs")
"""Loggers that would also print tracebacks, with signed addresses in them. They are silenced."""
T = TypeVar("T")
VERSION_KEYS = ("ETag", "etag", "md5Hash", "blob_id", "sha256", "mtime", "LastModified", "updated")
"""Keys of fsspec's entries whose values change with a file."""


@dataclass(frozen=True)
class StoredFile:
    """A file at an address, as a listing describes it."""

    size_bytes: int | None
    version: str
    """Text that changes with the file; "" if the file system has none."""


@dataclass(frozen=True)
class Storage:
    """The file or folder at an address. Names of files are relative to it."""

    url: str
    system: Any
    """fsspec's file system."""
    root: str
    """The path of the address in the file system."""

    def list_files(self) -> Mapping[str, StoredFile]:
        """Return all files below the folder by name; {} if it is missing.

        If the address is of a single file, its name is "".
        """
        with convert_errors(self.url, "can't be listed"):
            try:
                entries = self.system.find(self.root, detail=True)
            except FileNotFoundError:
                return {}
            return {
                path.removeprefix(self.root).lstrip("/"): _describe(entry)
                for path, entry in entries.items()
            }

    def list_names(self) -> list[str]:
        """Return the names of the folder's files and folders; [] if it is missing."""
        with convert_errors(self.url, "can't be listed"):
            try:
                paths = self.system.ls(self.root, detail=False)
            except FileNotFoundError:
                return []
            return [path.rstrip("/").rpartition("/")[2] for path in paths]

    def is_file(self) -> bool:
        """Return whether the address is of a single file."""
        # fsspec's `isfile` returns False for any error, also of the network.
        with convert_errors(self.url, "can't be read"), suppress(FileNotFoundError):
            return bool(self.system.info(self.root)["type"] == "file")
        return False

    def describe(self, name: str = "") -> StoredFile:
        """Return the description of a file; "" is the address itself."""
        with convert_errors(self._locate(name), "can't be read"):
            return _describe(self.system.info(self._path(name)))

    def read(self, name: str, at_most_bytes: int) -> bytes | None:
        """Return the content of a file, cut after `at_most_bytes`; None if it is missing or isn't a
        regular file: a local pipe or device may never end."""
        if self.url.startswith("file:") and not Path(self._path(name)).is_file():
            return None
        with convert_errors(self._locate(name), "can't be read"):
            try:
                with self.system.open(self._path(name), "rb") as file:
                    content: bytes = file.read(at_most_bytes)
            except FileNotFoundError:
                return None
            return content

    def write(self, name: str, content: bytes) -> None:
        """Write a file as a whole."""
        with convert_errors(self._locate(name), "can't be written"):
            self.system.pipe_file(self._path(name), content)

    def upload(self, file: Path, name: str) -> None:
        """Copy a local file to the address."""
        with convert_errors(self._locate(name), "can't be written"):
            self.system.put_file(str(file), self._path(name))

    def download(self, name: str, file: Path) -> None:
        """Copy a file of the address to a local file, whose folder exists."""
        with convert_errors(self._locate(name), "can't be read"):
            self.system.get_file(self._path(name), str(file))

    def remove(self, name: str) -> None:
        """Remove a file, or a folder with everything in it, if there is one."""
        with convert_errors(self._locate(name), "can't be removed"), suppress(FileNotFoundError):
            self.system.rm(self._path(name), recursive=True)

    def _path(self, name: str) -> str:
        return f"{self.root}/{name}" if name else self.root

    def _locate(self, name: str) -> str:
        return f"{self.url.rstrip('/')}/{name}" if name else self.url


def open_storage(url: str) -> Storage:
    """Open the file or folder at an address. Raises DataError if the file system isn't installed.

    Listings aren't cached, since other processes write too.
    """
    with convert_errors(url, "can't be opened"):
        for name in LOGGERS:
            logging.getLogger(name).setLevel(logging.CRITICAL + 1)
        core = importlib.import_module("fsspec.core")
        options = {"auto_mkdir": True} if url.startswith("file:") else {}
        system, root = core.url_to_fs(
            url.partition("#")[0], skip_instance_cache=True, use_listings_cache=False, **options
        )
        return Storage(url, system, root.rstrip("/"))


def retry(action: Callable[[], T]) -> T:
    """Return the result of an action. After a RunError, waits and repeats it for each WAITS_S."""
    for wait_s in WAITS_S:
        try:
            return action()
        except RunError:
            time.sleep(wait_s)
    return action()


@contextmanager
def convert_errors(address: str, action: str) -> Iterator[None]:
    """Raise the errors of a file system as DataError or RunError, in a single line."""
    try:
        yield
    except PipelineError:
        raise
    except ImportError as error:
        raise DataError(f"{address}: needs another package: {INSTALL} ({error})") from error
    except Exception as error:  # each file system has errors of its libraries
        raise _make_error(error, f"{address}: {action}") from error


def _make_error(error: BaseException, problem: str) -> PipelineError:
    """Return the error for a failed request; its message begins with `problem`."""
    cause = error.__cause__
    has_reason = isinstance(cause, OSError) or _read_status(cause) in REFUSED
    if isinstance(error, FileNotFoundError) and cause is not None and has_reason:
        # fsspec raises FileNotFoundError for all failed requests of HTTP.
        return _make_error(cause, problem)
    reason = getattr(error, "strerror", None) or first_line(error)
    # google.auth and botocore have no common type for missing credentials.
    is_refused = isinstance(error, PermissionError) or "Cred" in type(error).__name__
    if is_refused or _read_status(error) in REFUSED:
        return DataError(f"{problem}: the credentials are missing or refused: {first_line(error)}")
    if isinstance(error, FileNotFoundError):
        return DataError(f"{problem}: there is no such file, folder or bucket")
    return RunError(f"{problem}: {reason}")


def _read_status(error: BaseException | None) -> Any:
    """Return HTTP's status of an error; None without one."""
    return getattr(error, "status", None) or getattr(error, "code", None)


def _describe(entry: Mapping[str, Any]) -> StoredFile:
    version = next((str(entry[key]) for key in VERSION_KEYS if entry.get(key)), "")
    return StoredFile(entry.get("size"), version)
