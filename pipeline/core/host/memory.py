"""Available memory, and free memory of this process that is returned when memory is short.

The machine and the control groups of a container or scheduler limit what is available.

With the tunables of `process_start`, glibc keeps the memory that XLA frees after a dispatch. Small
arrays then take a place in it, and the next dispatch finds no room there. So the heap grows to two
to four times the memory of the program.
"""

from __future__ import annotations

import ctypes
import os
import re
import time
from contextlib import suppress
from math import inf
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")
_VERSIONS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group, of version 2 or 1, with its limit and its usage, and the key in
`memory.stat` of the reclaimable page cache, which the usage includes."""
PERIOD_S = 0.2
"""Least time between two checks of the heap."""
MARGIN = 1.25
"""Least available memory, as a multiple of the largest growth."""
FREEING_S = 0.01
"""Time in which a thread of XLA frees a dispatch's memory, after the results are there."""


class ProcessMemory(NamedTuple):
    """Memory of this process, in bytes."""

    address_bytes: int
    resident_bytes: int


def read_process_memory() -> ProcessMemory:
    """Return the memory of this process. Raises OSError if the system doesn't have /proc."""
    with open(_STATM, "rb", buffering=0) as file:
        pages = file.read().split()[:2]
    return ProcessMemory._make(int(count) * os.sysconf("SC_PAGE_SIZE") for count in pages)


def read_available_bytes() -> int:
    """Return the memory that is available, on this machine and in its control groups."""
    machine_bytes = 1024 * _read_number(_MEMINFO, r"^MemAvailable: +(\d+) kB$")
    if machine_bytes == 0:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    group_bytes = [
        _read_free_bytes(group / limit, group / usage, page_cache)
        for group in list_control_groups("memory")
        for limit, usage, page_cache in _VERSIONS
    ]
    return min([machine_bytes, *(count for count in group_bytes if count is not None)])


def require_room(size_bytes: int, purpose: str) -> None:
    """Raise ValueError if `purpose` needs more memory than is available."""
    available = read_available_bytes()
    if size_bytes > available:
        raise ValueError(
            f"{purpose} would take {size_bytes / 1e9:,.1f} GB of memory, {available / 1e9:,.1f} GB "
            "are available here"
        )


def _read_free_bytes(limit: Path, usage: Path, page_cache: str) -> int | None:
    """Return the bytes that a control group can still use; None if it's missing or not limited."""
    try:
        limit_bytes = int(limit.read_text())
        usage_bytes = int(usage.read_text())
    except (OSError, ValueError):
        return None
    cache_bytes = _read_number(limit.with_name("memory.stat"), rf"^{page_cache} (\d+)$")
    return max(0, limit_bytes - usage_bytes + cache_bytes)


def _read_number(file: Path, pattern: str) -> int:
    """Return the number in the first group of a pattern's match in a file; 0 without a match."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def list_control_groups(controller: str) -> tuple[Path, ...]:
    """Return the folders of this process's control group and its parents, in versions 2 and 1.

    `controller` is, for example, `memory`. Version 2 has one tree, version 1 a tree per controller.
    The smallest limit of these groups applies. Some folders may be missing, since the paths of
    groups are those outside of a container, whose root may be another group.
    """
    memberships = ""
    with suppress(OSError, ValueError):
        memberships = MEMBERSHIP.read_text(encoding="utf-8")
    folders: list[Path] = []
    # Lines `number:controllers:path`; controllers are "" in version 2.
    for controllers, path in re.findall(r"^[^:\n]*:([^:\n]*):(.*)$", memberships, re.MULTILINE):
        if not controllers:
            folders += [*_list_ancestors(CGROUP, path), *_list_ancestors(CGROUP / "unified", path)]
        elif controller in controllers.split(","):
            folders += _list_ancestors(CGROUP / controller, path)
    return tuple(dict.fromkeys((*folders, CGROUP, CGROUP / controller)))


def _list_ancestors(root: Path, group: str) -> list[Path]:
    """Return the folders from a group up to the root; only the root if the group is outside."""
    path = PurePosixPath(group.lstrip("/"))
    return [root] if ".." in path.parts else [root / part for part in (path, *path.parents)]


def return_free_pages() -> None:
    """Return free pages of the heap to the system (malloc_trim(3)).

    Using them again takes 0.2 s for a GB, and 4 s on a virtual machine whose host takes free pages.
    """
    time.sleep(FREEING_S)
    with suppress(AttributeError):  # another C library
        ctypes.CDLL(None).malloc_trim(0)


def read_resident_bytes() -> int:
    """Return the resident memory of this process; 0 if the system doesn't have /proc."""
    with suppress(OSError):
        return read_process_memory().resident_bytes
    return 0


class HeapTrimmer:
    """Returns free pages when the heap might grow by more memory than is available."""

    def __init__(self) -> None:
        self._resident_bytes = read_resident_bytes()
        """Resident memory at the last check."""
        self._limit_bytes: float | None = self._resident_bytes
        """Resident memory beyond which the heap has grown; None until the check after pages were
        returned."""
        self._largest_growth_bytes = 0
        """The largest growth from one check to the next."""
        self._checked_at_s = -inf

    def trim(self) -> None:
        """Return free pages if the heap has grown and wouldn't fit after another growth as large as
        the largest one. Checked at most every `PERIOD_S`.

        The memory that a program takes again after its pages were returned isn't growth.
        """
        now_s = time.monotonic()
        if now_s - self._checked_at_s < PERIOD_S:
            return
        self._checked_at_s = now_s
        resident_bytes = read_resident_bytes()
        growth_bytes = resident_bytes - self._resident_bytes
        self._resident_bytes = resident_bytes
        self._largest_growth_bytes = max(self._largest_growth_bytes, growth_bytes)
        if self._limit_bytes is None:
            self._limit_bytes = resident_bytes + self._largest_growth_bytes / 2
        has_grown = growth_bytes > 0 and resident_bytes > self._limit_bytes
        # Reading the available memory takes a millisecond.
        if has_grown and read_available_bytes() < MARGIN * self._largest_growth_bytes:
            return_free_pages()
            self._resident_bytes = read_resident_bytes()
            self._limit_bytes = None
