"""Faults in file operations: which calls fail, with which errno, and at which of them."""

from __future__ import annotations

import errno
import os
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

Mode = Literal["once", "from", "short"]

ERRNOS: Mapping[str, Sequence[int]] = {
    "mkdir": (errno.ENOSPC, errno.EACCES, errno.EROFS, errno.EIO),
    "create": (errno.ENOSPC, errno.EMFILE, errno.EROFS, errno.EINTR, errno.EIO),
    "open": (errno.EMFILE, errno.EIO, errno.EACCES, errno.EINTR),
    "read": (errno.EIO, errno.EINTR),
    "write": (errno.ENOSPC, errno.EIO, errno.EINTR, errno.EDQUOT),
    "rename": (errno.ENOSPC, errno.EIO, errno.EROFS, errno.EACCES),
    "link": (errno.ENOSPC, errno.EIO),
    "remove": (errno.EIO, errno.EACCES, errno.EROFS),
    "truncate": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "sync": (errno.EIO, errno.ENOSPC, errno.EINTR),
    "close": (errno.EIO, errno.ENOSPC, errno.EDQUOT),
    "list": (errno.EIO, errno.EMFILE, errno.EACCES),
    "stat": (errno.EIO, errno.EACCES),
    "lock": (errno.ENOLCK, errno.EIO, errno.EINTR),
    "copy": (errno.ENOSPC, errno.EIO),
    "chmod": (errno.EROFS, errno.EIO),
    "mmap": (errno.ENOMEM, errno.ENODEV),
}
"""Errnos of a kind of call; the number of the call and the seed select one."""

GROWING = ("mkdir", "create", "write", "rename", "link", "truncate", "copy")
LASTING: Mapping[str, tuple[Sequence[str], int]] = {
    "disk full": (GROWING, errno.ENOSPC),
    "read-only": (
        ("mkdir", "create", "rename", "link", "remove", "truncate", "chmod"),
        errno.EROFS,
    ),
    "disk broken": (tuple(ERRNOS), errno.EIO),
    "no descriptors": (("create", "open", "list"), errno.EMFILE),
}
"""Faults of all later calls, too: the kinds of call that fail, and their errno."""

SHORTENED = ("read", "write")
"""Kinds of call that may transfer only half of the bytes."""


@dataclass(frozen=True)
class Fault:
    """A fault of the `nth` call of some kinds; with mode "from", of all later calls, too."""

    name: str
    """The name in the table."""
    kinds: Sequence[str]
    mode: Mode
    nth: int
    error: int = 0

    def __str__(self) -> str:
        error = errno.errorcode.get(self.error, "half of it")
        ever_after = " and every one after" if self.mode == "from" else ""
        return f"{self.name}, call {self.nth}{ever_after}: {error}"

    def environment(self, root: Path, log: Path) -> dict[str, str]:
        """Return the settings of the library for calls below `root`."""
        return {
            **make_counting_settings(root, log),
            "INJECT_KINDS": ",".join(self.kinds),
            "INJECT_MODE": self.mode,
            "INJECT_NTH": str(self.nth),
            "INJECT_ERRNO": str(self.error),
        }

    def reasons(self) -> Sequence[str]:
        """Return texts; a message explains the fault if it has one of them."""
        return [os.strerror(self.error)] if self.error else []


def make_counting_settings(root: Path, log: Path) -> dict[str, str]:
    """Return settings of the library that log every call and let none fail."""
    return {"INJECT_ROOT": str(root), "INJECT_LOG": str(log), "INJECT_MODE": "count"}


def list_names() -> list[str]:
    """Return the names of faults in the table."""
    return [*ERRNOS, *(f"{kind}, short" for kind in SHORTENED), *LASTING]


def count_calls(name: str, counts: Counter[str]) -> int:
    """Return the number of calls that a fault of this name may affect."""
    return sum(counts[kind] for kind in list_kinds(name))


def list_kinds(name: str) -> Sequence[str]:
    """Return the kinds of call that a fault of this name affects."""
    if name in LASTING:
        return LASTING[name][0]
    return [name.partition(",")[0]]


def iter_faults(name: str, counts: Counter[str], most: int | None, seed: int) -> Iterator[Fault]:
    """Yield the faults of a name: at every call, or at `most` evenly spread calls.

    The first and the last call are among them.
    """
    calls = count_calls(name, counts)
    kinds = list_kinds(name)
    for nth in _spread(calls, calls if most is None else most):
        if name in LASTING:
            yield Fault(name, kinds, "from", nth, LASTING[name][1])
        elif name in ERRNOS:
            errnos = ERRNOS[name]
            yield Fault(name, kinds, "once", nth, errnos[(nth - 1 + seed) % len(errnos)])
        else:
            yield Fault(name, kinds, "short", nth)


def _spread(calls: int, most: int) -> list[int]:
    if most >= calls:
        return list(range(1, calls + 1))
    if most <= 1:
        return [1][:most]
    return sorted({1 + round(i * (calls - 1) / (most - 1)) for i in range(most)})
