"""Available memory, by the machine and by the control groups with which a container or a scheduler
limits this process: too large requests fail with a message before the system kills it."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")


@dataclass(frozen=True)
class _LimitFiles:
    """Names of a control group's files: its limit, its usage, and the statistic of reclaimable page
    cache within the usage."""

    limit: str
    usage: str
    page_cache: str


_VERSION_2 = _LimitFiles("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _LimitFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


def available_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the memory that is still available, on this machine and in its container."""
    free_bytes = 1024 * _read_number(_MEMINFO, r"^MemAvailable: +(\d+) kB$")
    free_bytes = free_bytes or os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    groups = groups_of("memory", cgroup, membership)
    versions = (_VERSION_2, _VERSION_1)
    left = (_left_bytes(group, files) for group in groups for files in versions)
    return min([free_bytes, *(count for count in left if count is not None)])


def require_room(size_bytes: int, what: str) -> None:
    """Raise ValueError if `what` needs more memory than is available."""
    available = available_bytes()
    if size_bytes > available:
        raise ValueError(
            f"{what} would take {size_bytes / 1e9:,.1f} GB of memory, {available / 1e9:,.1f} GB "
            "are available here"
        )


def _left_bytes(group: Path, files: _LimitFiles) -> int | None:
    """Return the bytes left under a control group's limit; None if it doesn't exist or has none."""
    try:
        left = int((group / files.limit).read_text()) - int((group / files.usage).read_text())
    except (OSError, ValueError):
        return None
    return max(0, left + _read_number(group / "memory.stat", rf"^{files.page_cache} (\d+)$"))


def _read_number(file: Path, pattern: str) -> int:
    """Return the number that a pattern finds in a file; 0 without a match."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def groups_of(
    controller: str, root: Path = CGROUP, membership: Path = MEMBERSHIP
) -> tuple[Path, ...]:
    """Return the folders of this process's control group and its parents, in version 2 and 1.

    `controller` is, for example, `memory`; version 2 has one tree, version 1 a tree for each
    controller. The smallest limit of all these groups applies. Some folders may not exist: a
    container may see its group as the root, under any name outside.
    """
    folders: list[Path] = []
    for controllers, path in _memberships(membership):
        if not controllers:
            folders += [*_upwards(root, path), *_upwards(root / "unified", path)]
        elif controller in controllers.split(","):
            folders += _upwards(root / controller, path)
    return tuple(dict.fromkeys((*folders, root, root / controller)))


def _memberships(file: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield controllers (none in version 2) and group, from `number:controllers:path`."""
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        _, _, described = line.partition(":")
        controllers, colon, path = described.partition(":")
        if colon:
            yield controllers, PurePosixPath(path)


def _upwards(root: Path, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folders from a group up to the root; the root alone for a group outside of it."""
    names = () if ".." in group.parts else group.parts[1:]
    for length in range(len(names), -1, -1):
        yield root.joinpath(*names[:length])
