"""Ownership of folders and files: checks that only this user can write them, and private folders.

A compiled program is code, so a user who can write to the folder of programs can run code.
"""

from __future__ import annotations

import errno
import grp
import os
import pwd
import stat
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

ROOT = 0


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
