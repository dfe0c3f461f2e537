"""Files and folders that are no links or pipes, in folders that anyone may have created.

A link in such a folder would have files outside of it written, truncated or deleted; a pipe would
have its writer wait forever.
"""

from __future__ import annotations

import errno
import os
import stat
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path

from pipeline.core.errors import DataError, printable


def open_real(path: str | Path, flags: int) -> int:
    """Return the descriptor of a regular file, opened with `flags`, which may include O_CREAT.

    Raises OSError where it can't be opened, is a symbolic link or is no regular file.
    """
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a reader.
        how = flags | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, how, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "is no regular file", str(path))
    return descriptor


def open_unshared(path: str | Path, flags: int) -> int:
    """Open a file to change its content in place, as `open_real` does.

    Raises OSError also for a file with several hard links: a backup, or a file of somebody else,
    would change with it.
    """
    descriptor = open_real(path, flags)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "is a hard link", str(path))
    return descriptor


def require_real(folder: Path, files: Iterable[str], unshared: Iterable[str]) -> None:
    """Raise DataError unless all existing `files` in `folder` are regular files.

    Those of `unshared` must have no second hard link.
    """
    for name in files:
        path = folder / name
        status = _status_of(path)
        if status is None:
            continue
        if stat.S_ISDIR(status.st_mode):
            raise _refused(path, "is a directory, and must be a file; remove it")
        _require_regular(path, status)
        if name in unshared and status.st_nlink > 1:
            reason = f"its file has {status.st_nlink} names, and would be changed under all"
            raise _refused(path, f"is a hard link: {reason}; put a copy in its place")


def require_real_folder(folder: Path) -> None:
    """Raise DataError where the path of a folder is a link or a file."""
    status = _status_of(folder)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        _require_regular(folder, status)
        raise _refused(folder, "is a file, and must be a directory; remove it")


def require_real_trees(folder: Path, names: Iterable[str]) -> None:
    """Raise DataError where one of the folders `names` is or holds a link, at any depth.

    Files in them must be regular ones. Missing folders are skipped.
    """
    left = [folder / name for name in names]
    while left:
        path = left.pop()
        require_real_folder(path)
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            # There may be thousands of files.
            left += [Path(e.path) for e in entries if not e.is_file(follow_symlinks=False)]


def _status_of(path: Path) -> os.stat_result | None:
    try:
        return path.lstat()
    except FileNotFoundError:
        return None


def _require_regular(path: Path, status: os.stat_result) -> None:
    if stat.S_ISLNK(status.st_mode):
        target = os.readlink(path)
        rule = "nothing outside a run's directory is written"
        advice = "put in its place what it stands for, or remove it"
        raise _refused(path, f"is a link to {target}; {rule}, so {advice}")
    if not stat.S_ISREG(status.st_mode):
        raise _refused(path, "is no regular file; remove it")


def _refused(path: Path, reason: str) -> DataError:
    """The error for a path, made printable: names may hold line breaks."""
    return DataError(printable(f"{path}: {reason}"))
