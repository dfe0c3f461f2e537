"""Available memory: too large requests fail with a message before the system kills the process."""

from __future__ import annotations

import os
import re
from pathlib import Path

from pipeline.core.host.cgroups import CGROUP, MEMBERSHIP, groups_of

_MEMINFO = Path("/proc/meminfo")
_LIMITS = (
    ("memory.max", "memory.current", "inactive_file"),
    ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
)
"""Files of a control group, in version 2 and 1: limit, usage, and the statistic of reclaimable page
cache within the usage."""


def available_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Memory that is still available to a process, on this machine and in its container."""
    groups = groups_of("memory", cgroup, membership)
    left = (_left_bytes(group, *names) for group in groups for names in _LIMITS)
    return min([_free_bytes(), *(count for count in left if count is not None)])


def require_room(size_bytes: int, what: str) -> None:
    """Raise ValueError where `what` needs more memory than is available."""
    available = available_bytes()
    if size_bytes > available:
        raise ValueError(
            f"{what} would take {size_bytes / 1e9:,.1f} GB of memory, {available / 1e9:,.1f} GB "
            "are available here"
        )


def _free_bytes() -> int:
    try:
        text = _MEMINFO.read_text(encoding="utf-8")
    except OSError:
        text = ""
    found = re.search(r"^MemAvailable: +(\d+) kB$", text, re.MULTILINE)
    if found is None:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    return 1024 * int(found[1])


def _left_bytes(group: Path, limit: str, used: str, copies: str) -> int | None:
    """Bytes left under a control group's limit; None where it does not exist or has no limit."""
    try:
        left = int((group / limit).read_text()) - int((group / used).read_text())
    except (OSError, ValueError):
        return None
    return max(0, left + _statistic(group / "memory.stat", copies))


def _statistic(file: Path, name: str) -> int:
    try:
        found = re.search(rf"^{name} (\d+)$", file.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(found[1]) if found else 0
