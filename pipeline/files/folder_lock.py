"""Locks among processes, which the kernel frees when their holder dies.

Files are locked: network file systems lock no folders, and files only that are open to write. Who
removes such a file takes the lock away with it, since the next process makes and locks another. So
a lock counts only while the name still means the file that is locked: this is looked at when it is
taken, and as often as its holder likes (`Lock.keep`).
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from pipeline.files.ownership import make_private
from pipeline.files.real_files import open_real

LOCK = ".lock"
NOT_HELD = -1


class Lock:
    """The lock on a file, which is made where it is missing and never written.

    `is_certain` says whether the file system has locks: where it has none, nothing keeps a second
    process out.
    """

    def __init__(self, file: Path) -> None:
        self._file, self._descriptor = file, NOT_HELD
        self.is_certain = True

    def acquire(self, *, wait: bool) -> bool:
        """Take the lock; False where another process has it and this one is not to wait.

        Raises OSError where there can be no such file, and where it is a link or a pipe.
        """
        while True:
            descriptor = open_real(self._file, os.O_RDWR | os.O_CREAT)
            try:
                self.is_certain = flock(descriptor, wait=wait)
                if _is_named(descriptor, self._file):
                    self._descriptor, descriptor = descriptor, NOT_HELD
                    return True
            except BlockingIOError:
                return False
            finally:
                if descriptor != NOT_HELD:
                    os.close(descriptor)

    def keep(self) -> bool:
        """See that the lock still counts, and take it once more where its file was removed.

        False where another process was faster. Raises OSError where the file can't be made.
        """
        if _is_named(self._descriptor, self._file):
            return True
        again = Lock(self._file)
        if not again.acquire(wait=False):
            return False
        self._descriptor, again._descriptor = again._descriptor, self._descriptor
        again.release()
        return True

    def release(self) -> None:
        """Let others have it. The file stays: another process may be about to lock it."""
        os.close(self._descriptor)
        self._descriptor = NOT_HELD


def flock(descriptor: int, *, wait: bool) -> bool:
    """Lock an open file or folder until it is closed; False where it can't be locked at all.

    Raises BlockingIOError where another process has it and this one is not to wait.
    """
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX if wait else fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        raise
    except OSError:
        return False
    return True


def _is_named(descriptor: int, file: Path) -> bool:
    """Whether the name of a file still means the one that was opened."""
    try:
        return os.path.samestat(os.lstat(file), os.fstat(descriptor))
    except FileNotFoundError:
        return False


@contextmanager
def locked_file(file: Path, *, wait: bool) -> Iterator[Lock | None]:
    """Hold the lock on a file; None where another process has it. Raises OSError as `Lock` does."""
    lock = Lock(file)
    if not lock.acquire(wait=wait):
        yield None
        return
    try:
        yield lock
    finally:
        lock.release()


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against all other holders; waits for its turn.

    It is made for this user alone where it is missing. Where there are no locks, checksums and
    atomic renames have to do. Raises OSError when it can't be made or written.
    """
    make_private(folder)
    with locked_file(folder / LOCK, wait=True):
        yield


@contextmanager
def owned_folder(folder: Path) -> Iterator[Lock | None]:
    """Hold a folder for long, without waiting for it; None where another process has it.

    The folder itself is locked besides the file in it: that lock nobody can remove. Where it works
    (not between the machines of a network file system) a second process is kept out whatever
    becomes of the file. Elsewhere one may come in between the removal and the holder's next
    `Lock.keep`, which then finds that one, or keeps out whoever comes later.
    """
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        if not _is_free(descriptor):
            yield None
            return
        with locked_file(folder / LOCK, wait=False) as lock:
            yield lock
    finally:
        os.close(descriptor)


def _is_free(descriptor: int) -> bool:
    try:
        flock(descriptor, wait=False)
    except BlockingIOError:
        return False
    return True
