"""A folder that several processes write into, one at a time."""

from __future__ import annotations

import fcntl
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from pipeline.ownership import make_private

LOCK = ".lock"
"""What is locked: network file systems lock no folders, and files only that are open to write."""


@contextmanager
def locked(folder: Path) -> Iterator[None]:
    """Hold `folder` against all other holders; waits for its turn.

    It is made for this user alone where it is missing. Raises OSError when it can't be made or
    written.
    """
    make_private(folder)
    with (folder / LOCK).open("wb") as lock:
        # Some network file systems have no locks; checksums and atomic renames have to do there.
        with suppress(OSError):
            fcntl.flock(lock, fcntl.LOCK_EX)
        yield
