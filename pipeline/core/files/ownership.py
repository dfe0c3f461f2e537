"""Ownership of folders and files: checks that only this user can write them, and private folders.

A compiled program is code, so a user who can write to the folder of programs can run code.
"""

from __future__ import annotations

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
    """Create a folder, and its missing parents, for this user alone.

    The umask is not relied on, since many systems let the group write. Existing folders are
    unchanged. Raises OSError if one can't be created.
    """
    with suppress(FileExistsError):
        if not folder.parent.exists():
            make_private(folder.parent)
        folder.mkdir(mode=stat.S_IRWXU)
    if not folder.is_dir():
        raise NotADirectoryError(20, os.strerror(20), str(folder))


def find_foreign_owner(status: os.stat_result) -> str | None:
    """Return the owner of a folder or a file as text; None if it is this user or root."""
    if status.st_uid in (os.geteuid(), ROOT):
        return None
    return f"user {_name_or_number(pwd.getpwuid, status.st_uid)}"


def find_writers(status: os.stat_result) -> str | None:
    """Return the users besides its owner who may write a folder or a file, as text; None for none.

    The sticky bit makes no difference: it prevents removals, and still allows additions.
    """
    if status.st_mode & stat.S_IWOTH:
        return "everybody"
    if status.st_mode & stat.S_IWGRP and not _is_of_one(status.st_gid):
        return f"group {_name_or_number(grp.getgrgid, status.st_gid)}"
    return None


def _is_of_one(gid: int) -> bool:
    """Return whether this user is the only member of a group.

    Debian and Fedora give each user such a group, named after the user, and a umask that lets it
    write; pam_umask recognises it by its name too. Listing all users whose primary group it is may
    take minutes if accounts are on a server.
    """
    try:
        user = pwd.getpwuid(os.geteuid())
        group = grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return alone and user.pw_gid == gid and group.gr_name == user.pw_name


def _name_or_number(find: Callable[[int], Sequence[Any]], number: int) -> str:
    """Return the name of a user or a group; its number if it has none."""
    try:
        return str(find(number)[0])
    except KeyError:
        return str(number)
