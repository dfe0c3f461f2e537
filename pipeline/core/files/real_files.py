"""Files and folders that aren't links or pipes, in folders that anyone may have created.

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

    Raises OSError if it can't be opened, is a symbolic link or isn't a regular file.
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

    A file of `unshared` must have no second hard link.
    """
    for name in files:
        status = _require_no_link(folder / name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise _refusal(folder / name, "is a directory, and must be a file; remove it")
        if status is not None and name in unshared and status.st_nlink > 1:
            reason = f"its file has {status.st_nlink} names, and would be changed under all"
            raise _refusal(folder / name, f"is a hard link: {reason}; put a copy in its place")


def require_real_folder(folder: Path) -> None:
    """Raise DataError if the path of a folder is a link or a file."""
    status = _require_no_link(folder)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise _refusal(folder, "is a file, and must be a directory; remove it")


def require_real_trees(folder: Path, names: Iterable[str]) -> None:
    """Raise DataError if one of the folders `names` is or holds a link, at any depth.

    Files in them must be regular ones. Missing folders are skipped.
    """
    left = [folder / name for name in names]
    while left:
        path = left.pop()
        require_real_folder(path)
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            # There may be thousands of files.
            left += [Path(e.path) for e in entries if not e.is_file(follow_symlinks=False)]


def _require_no_link(path: Path) -> os.stat_result | None:
    """Return the status of a file or a folder, None if it is missing. Raises DataError for a link,
    a pipe and others."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        rule = "nothing outside a run's directory is written"
        advice = "put in its place what it stands for, or remove it"
        raise _refusal(path, f"is a link to {os.readlink(path)}; {rule}, so {advice}")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise _refusal(path, "is no regular file; remove it")
    return status


def _refusal(path: Path, reason: str) -> DataError:
    """Return the error for a path, made printable: names may hold line breaks."""
    return DataError(printable(f"{path}: {reason}"))
