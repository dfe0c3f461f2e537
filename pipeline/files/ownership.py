"""Whose a folder or a file is: what is only this user's to write, and making folders that are.

A compiled program is code, so whoever can write where it is kept can have it run.
"""

from __future__ import annotations

import grp
import os
import pwd
import stat
from contextlib import suppress
from pathlib import Path

ROOT = 0


def make_private(folder: Path) -> None:
    """Make a folder, and those above that are missing, for this user alone.

    Whatever the umask says: many systems let the group write. Those that are there stay as they
    are. Raises OSError where one can't be made.
    """
    with suppress(FileExistsError):
        if not folder.parent.exists():
            make_private(folder.parent)
        folder.mkdir(mode=stat.S_IRWXU)
    if not folder.is_dir():
        raise NotADirectoryError(20, os.strerror(20), str(folder))


def find_foreign_owner(found: os.stat_result) -> str | None:
    """Whose a folder or a file is, in words; None where it is this user's or root's."""
    if found.st_uid in (os.geteuid(), ROOT):
        return None
    return f"user {_name_of_user(found.st_uid)}"


def find_writers(found: os.stat_result) -> str | None:
    """Who besides its owner may write a folder or a file, in words; None where nobody may.

    The sticky bit makes no difference: with it nobody removes what is there, and anybody adds.
    """
    if found.st_mode & stat.S_IWOTH:
        return "everybody"
    if found.st_mode & stat.S_IWGRP and not _is_of_one(found.st_gid):
        return f"group {_name_of_group(found.st_gid)}"
    return None


def _is_of_one(gid: int) -> bool:
    """Whether a group has nobody but this user in it.

    Debian and Fedora give each user such a group, named as the user, and a umask that lets it
    write; pam_umask knows it by the name too. To list all users for whom it is the first group may
    take minutes where they are kept elsewhere.
    """
    try:
        user, group = pwd.getpwuid(os.geteuid()), grp.getgrgid(gid)
    except KeyError:
        return False
    alone = set(group.gr_mem) <= {user.pw_name}
    return alone and user.pw_gid == gid and group.gr_name == user.pw_name


def _name_of_user(uid: int) -> str:
    try:
        return pwd.getpwuid(uid).pw_name
    except KeyError:
        return str(uid)


def _name_of_group(gid: int) -> str:
    try:
        return grp.getgrgid(gid).gr_name
    except KeyError:
        return str(gid)
