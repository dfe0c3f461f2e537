"""Atomic writes of bytes, texts and strict JSON: readers see complete files alone. Locks between
processes, which the kernel releases when their holder dies."""

from __future__ import annotations

import errno
import fcntl
import json
import math
import os
import socket
import sys
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import IO, Any

from pipeline.core.errors import RunError, get_system_reason
from pipeline.core.files.trusted_files import make_private, open_real

UNSYNCABLE = frozenset({errno.EINVAL, errno.ENOTSUP, errno.EACCES})
"""Error numbers for folders whose file system or permissions don't allow a sync."""

DEVICES = Path("/dev")


def write_whole(path: Path, content: str | bytes, mode: int = 0o666) -> None:
    """Replace the file at `path` by `content` atomically, as `commit` does.

    Text is written in UTF-8. Surrogates, which stand for bytes of file names that aren't UTF-8, are
    escaped: 0xff is written as \\udcff. `mode` has the permissions, reduced by the umask. Raises
    OSError with the file's name if it can't be written; then it is unchanged. A device, such as
    /dev/null or /dev/stdout, is written to, and never replaced.
    """
    encoded = content.encode("utf-8", "backslashreplace") if isinstance(content, str) else content
    # Machines that share a file system may have processes with the same id.
    draft = path.with_name(f"{path.name}.{socket.gethostname()}.{os.getpid()}.part")
    try:
        if _is_device(path):
            with _open_device(path) as device:
                device.write(encoded)
            return
        # The file must be new, since the name may be a link that somebody else made.
        draft.unlink(missing_ok=True)
        with open(draft, "xb", opener=partial(os.open, mode=mode)) as file:
            file.write(encoded)
        commit(draft, path)
    except OSError as error:
        error.filename = str(path)
        with suppress(OSError):
            draft.unlink()
        raise


@contextmanager
def convert_write_errors(path: Path) -> Iterator[None]:
    """Raise RunError with the system's reason for an OSError of the block.

    The message names the error's file, or `path` if the error doesn't name any.
    """
    try:
        yield
    except OSError as error:
        file = error.filename or path
        raise RunError(f"{file}: can't be written: {get_system_reason(error)}") from error


def _is_device(path: Path) -> bool:
    """Return whether a path, or the target of a link, is a device or a stream of the process."""
    is_listed = path.absolute().parent in (DEVICES, DEVICES / "fd")
    return is_listed or path.is_char_device() or path.is_block_device()


def _open_device(path: Path) -> IO[bytes]:
    """Open a device for writing. If it is stdout or stderr, its file isn't truncated."""
    status = path.stat()
    for descriptor, stream in ((1, sys.stdout), (2, sys.stderr)):
        if os.path.samestat(status, os.fstat(descriptor)):
            stream.flush()
            return os.fdopen(os.dup(descriptor), "wb")
    return path.open("wb")


def commit(draft: Path, path: Path) -> None:
    """Rename a finished draft, a file or a folder, to `path`; an existing file is replaced.

    After a power cut during the call, `path` is the previous file or the complete new one; after a
    later power cut, it is the new one. Raises OSError.
    """
    sync_tree(draft)
    draft.replace(path)
    sync(path.parent)


def sync_tree(path: Path) -> None:
    """Sync a file, or a folder with everything in it. Raises OSError."""
    if path.is_dir():
        for inner_path in path.iterdir():
            sync_tree(inner_path)
    sync(path)


def sync_ancestors(path: Path) -> None:
    """Sync all folders above a file or folder on its file system, so that a power cut can't remove
    its path. Raises OSError."""
    folder = path.resolve()
    while not os.path.ismount(folder):
        folder = folder.parent
        sync(folder)


def sync(path: Path) -> None:
    """Wait until a power cut can't change the content of a file, or the names in a folder.

    A folder that can't be synced is left to the file system. Raises OSError with the file's name.
    """
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)
    except OSError as error:
        if error.errno in UNSYNCABLE and path.is_dir():
            return
        error.filename = str(path)
        raise


def format_json(value: Any, indent: int | None = None) -> str:
    """Return `value` as JSON; NaN and infinities, which JSON can't represent, become null."""
    return json.dumps(_replace_non_finite(value), indent=indent, allow_nan=False)


def write_json(path: Path, value: Any) -> None:
    """Write `value` as an indented JSON file, atomically. Raises RunError if the disk refuses."""
    with convert_write_errors(path):
        write_whole(path, format_json(value, indent=1) + "\n")


def _replace_non_finite(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _replace_non_finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_replace_non_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


LOCK = ".lock"
NOT_HELD = -1


class Lock:
    """The lock on a file, which is created if it is missing, and never written.

    `is_certain` is false if the file system has no locks, so that a second process isn't excluded.
    """

    def __init__(self, file: Path) -> None:
        self._file = file
        self._descriptor = NOT_HELD
        self.is_certain = True

    def acquire(self, *, wait: bool) -> bool:
        """Acquire the lock; return False if another process holds it and `wait` is false.

        If the file is replaced meanwhile, the new file is locked instead. Raises OSError if the
        file can't be created, and if it is a link or a pipe.
        """
        while True:
            descriptor = open_real(self._file, os.O_RDWR | os.O_CREAT)
            is_acquired = False
            try:
                self.is_certain = lock_descriptor(descriptor, wait=wait)
                is_acquired = _leads_to(self._file, descriptor)
                if is_acquired:
                    self._descriptor = descriptor
                    return True
            except BlockingIOError:
                return False
            finally:
                if not is_acquired:
                    os.close(descriptor)

    def keep(self) -> bool:
        """Check that the lock is valid, and acquire it again if its file was removed.

        Returns False if another process was faster. Raises OSError if the file can't be created.
        """
        if _leads_to(self._file, self._descriptor):
            return True
        previous = self._descriptor
        if not self.acquire(wait=False):
            return False
        os.close(previous)
        return True

    def release(self) -> None:
        """Release the lock. The file stays: another process may be about to lock it."""
        os.close(self._descriptor)
        self._descriptor = NOT_HELD


def lock_descriptor(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed; return False if the system can't lock it.
    Raises BlockingIOError if another process holds the lock and `wait` is false."""
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def lock_refusal(file: Path) -> str | None:
    """Return the system's reason why a file can't be locked; None if it can be locked."""
    try:
        with file.open("a") as opened:
            fcntl.flock(opened, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        return error.strerror or str(error)
    return None


def _leads_to(file: Path, descriptor: int) -> bool:
    """Return whether the path of a file still leads to the opened file."""
    try:
        return os.path.samestat(os.lstat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def lock_file(file: Path, *, wait: bool) -> Iterator[Lock | None]:
    """Hold the lock on a file; None if another process holds it. Raises OSError as `Lock` does."""
    lock = Lock(file)
    if not lock.acquire(wait=wait):
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()


@contextmanager
def lock_folder(folder: Path) -> Iterator[None]:
    """Hold the lock on a folder, after waiting for other holders.

    A missing folder is created only for this user. If the file system has no locks, checksums and
    atomic renames protect the files. Raises OSError if the folder can't be created or written.
    """
    make_private(folder)
    with lock_file(folder / LOCK, wait=True):
        yield


@contextmanager
def try_lock_folder(folder: Path) -> Iterator[Lock | None]:
    """Hold the lock on a folder without waiting; None if another process holds it.

    Both the folder and a file in it are locked. The folder's lock remains if the file is removed,
    but only processes of this machine see it. On a network file system, if the file is removed,
    another machine can acquire the file's lock until the holder's next `Lock.keep`.
    """
    with (
        try_hold_folder(folder) as is_free,
        lock_file(folder / LOCK, wait=False) if is_free else nullcontext() as lock,
    ):
        yield lock


@contextmanager
def try_hold_folder(folder: Path) -> Iterator[bool]:
    """Hold the lock on a folder itself, which leaves no file, without waiting; yield False if
    another process of this machine holds it. Raises OSError if it can't be opened."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_free = True
        try:
            lock_descriptor(descriptor, wait=False)
        except BlockingIOError:
            is_free = False
        yield is_free
    finally:
        os.close(descriptor)
