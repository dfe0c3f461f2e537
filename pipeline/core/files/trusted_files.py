"""Files and folders that no other user could have made or changed.

They aren't links or pipes, and only this user can write them.

Through a link in such a folder, a run would write, truncate or delete files outside of it. A pipe
would block its writer forever.

A compiled program is code, so a user who can write to the folder of programs can run code.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from pipeline.core.errors import DataError, printable

ROOT = 0


def open_real(path: str | Path, flags: int) -> int:
    """Return the descriptor of a regular file, opened with `flags`, which may include O_CREAT.
    Raises OSError if the file can't be opened, is a symbolic link or isn't a regular file."""
    try:
        # Without O_NONBLOCK, opening a pipe would wait for a reader.
        flags |= os.O_NOFOLLOW | os.O_NONBLOCK | os.O_CLOEXEC
        descriptor = os.open(path, flags, 0o666)
    except OSError as error:
        if error.errno == errno.ELOOP and os.path.islink(path):
            raise OSError(errno.ELOOP, "is a symbolic link", str(path)) from None
        raise
    if not stat.S_ISREG(os.fstat(descriptor).st_mode):
        os.close(descriptor)
        raise OSError(errno.EINVAL, "isn't a regular file", str(path))
    return descriptor


def open_unshared(path: str | Path, flags: int) -> int:
    """Open a file as `open_real` does, to change its content in place.

    Also raises OSError for a file with several hard links, since the content would change under its
    other names, such as a backup's, too.
    """
    descriptor = open_real(path, flags)
    if os.fstat(descriptor).st_nlink > 1:
        os.close(descriptor)
        raise OSError(errno.EMLINK, "is a hard link", str(path))
    return descriptor


def require_real(folder: Path, files: Iterable[str], unshared: Iterable[str]) -> None:
    """Raise DataError unless all existing `files` in `folder` are regular files.

    Those in `unshared` must have no second hard link.
    """
    for name in files:
        status = _require_no_link(folder / name)
        if status is not None and stat.S_ISDIR(status.st_mode):
            raise _make_error(folder / name, "is a directory, and must be a file; remove it")
        if status is not None and name in unshared and status.st_nlink > 1:
            reason = f"the file has {status.st_nlink} names, and would change under all of them"
            raise _make_error(folder / name, f"is a hard link: {reason}; replace it by a copy")


def require_real_folder(folder: Path) -> None:
    """Raise DataError if the path of a folder is a link or a file."""
    status = _require_no_link(folder)
    if status is not None and not stat.S_ISDIR(status.st_mode):
        raise _make_error(folder, "is a file, and must be a directory; remove it")


def require_real_trees(folder: Path, names: Iterable[str]) -> None:
    """Raise DataError if a folder in `names` is a link, or contains one at any depth.

    Files in the folders must be regular files. Missing folders are skipped.
    """
    unchecked = [folder / name for name in names]
    while unchecked:
        path = unchecked.pop()
        require_real_folder(path)
        with suppress(FileNotFoundError), os.scandir(path) as entries:
            # Regular files, of which there may be thousands, need no further check.
            unchecked += [Path(e.path) for e in entries if not e.is_file(follow_symlinks=False)]


def _require_no_link(path: Path) -> os.stat_result | None:
    """Return the status of a file or a folder; None if missing. Raises DataError for others."""
    try:
        status = path.lstat()
    except FileNotFoundError:
        return None
    if stat.S_ISLNK(status.st_mode):
        rule = "nothing outside a run's directory is written"
        advice = "replace it by a copy of its target, or remove it"
        raise _make_error(path, f"is a link to {os.readlink(path)}; {rule}, so {advice}")
    if not stat.S_ISREG(status.st_mode) and not stat.S_ISDIR(status.st_mode):
        raise _make_error(path, "isn't a regular file; remove it")
    return status


def _make_error(path: Path, reason: str) -> DataError:
    """Return the error for a path. Line breaks in its name are escaped."""
    return DataError(printable(f"{path}: {reason}"))


def make_private(folder: Path) -> None:
    """Create a folder, and its missing parents, for this user alone, whatever the umask is.

    Existing folders are unchanged. Raises OSError if a folder can't be created.
    """
    with suppress(FileExistsError):
        if not folder.parent.exists():
            make_private(folder.parent)
        folder.mkdir(mode=stat.S_IRWXU)
    if not folder.is_dir():
        raise NotADirectoryError(errno.ENOTDIR, os.strerror(errno.ENOTDIR), str(folder))


def find_foreign_owner(status: os.stat_result) -> str | None:
    """Return a text with the owner of a folder or a file; None if it is this user or root."""
    if status.st_uid in (os.geteuid(), ROOT):
        return None
    return f"user {_format_id(pwd.getpwuid, status.st_uid)}"


def find_writers(status: os.stat_result) -> str | None:
    """Return a text with the users, besides the owner, who may write a folder or a file, else None.

    The sticky bit makes no difference: it prevents removals, but allows additions.
    """
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_private_group(status.st_gid):
        return f"group {_format_id(grp.getgrgid, status.st_gid)}"
    return None


def _is_private_group(gid: int) -> bool:
    """Return whether this user is the only member of a group.

    Debian and Fedora make such a group for each user, named after the user, and a umask that lets
    it write. pam_umask recognizes it by its name too: listing all users with this primary group
    may take minutes if accounts are on a server.
    """
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    is_alone = set(group.gr_mem) <= {user.pw_name}
    return is_alone and user.pw_gid == gid and group.gr_name == user.pw_name


def _format_id(find_entry: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or a group; its number if it has no name."""
    try:
        return str(find_entry(number)[0])
    except KeyError:
        return str(number)
