"""Locks between processes, which the kernel releases when their holder dies.

A lock is on a file, opened for writing, since network file systems can't lock folders. If the file
is removed, the next process creates and locks another file. So a lock is valid only while its path
leads to the locked file. This is checked when the lock is acquired, and by `Lock.keep`.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

from pipeline.core.files.trusted_files import make_private, open_real

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
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        is_free = True
        try:
            lock_descriptor(descriptor, wait=False)
        except BlockingIOError:
            is_free = False
        with lock_file(folder / LOCK, wait=False) if is_free else nullcontext() as lock:
            yield lock
    finally:
        os.close(descriptor)
