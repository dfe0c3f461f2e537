"""Available memory, which the machine and the control groups of a container or scheduler limit."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import NamedTuple

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")
_MEMINFO = Path("/proc/meminfo")
_STATM = Path("/proc/self/statm")


@dataclass(frozen=True)
class _LimitFiles:
    """Names of a control group's files, by its version."""

    limit: str
    usage: str
    page_cache: str
    """Key in `memory.stat` of the reclaimable page cache, which the usage includes."""


_VERSION_2 = _LimitFiles("memory.max", "memory.current", "inactive_file")
_VERSION_1 = _LimitFiles("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file")


class ProcessMemory(NamedTuple):
    """Memory of this process, in bytes."""

    address_bytes: int
    resident_bytes: int


def read_process_memory() -> ProcessMemory:
    """Return the memory of this process. Raises OSError if the system doesn't have /proc."""
    with open(_STATM, "rb", buffering=0) as file:
        pages = file.read().split()[:2]
    return ProcessMemory._make(int(count) * os.sysconf("SC_PAGE_SIZE") for count in pages)


def read_available_bytes(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> int:
    """Return the memory that is available, on this machine and in its control groups."""
    machine_bytes = 1024 * _read_number(_MEMINFO, r"^MemAvailable: +(\d+) kB$")
    if machine_bytes == 0:
        machine_bytes = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_AVPHYS_PAGES")
    groups = list_control_groups("memory", cgroup, membership)
    versions = (_VERSION_2, _VERSION_1)
    group_bytes = (_read_free_bytes(group, files) for group in groups for files in versions)
    return min([machine_bytes, *(count for count in group_bytes if count is not None)])


def require_room(size_bytes: int, purpose: str) -> None:
    """Raise ValueError if `purpose` needs more memory than is available."""
    available = read_available_bytes()
    if size_bytes > available:
        raise ValueError(
            f"{purpose} would take {size_bytes / 1e9:,.1f} GB of memory, {available / 1e9:,.1f} GB "
            "are available here"
        )


def _read_free_bytes(group: Path, files: _LimitFiles) -> int | None:
    """Return the bytes that a control group can still use; None if it's missing or not limited."""
    try:
        limit_bytes = int((group / files.limit).read_text())
        usage_bytes = int((group / files.usage).read_text())
    except (OSError, ValueError):
        return None
    cache_bytes = _read_number(group / "memory.stat", rf"^{files.page_cache} (\d+)$")
    return max(0, limit_bytes - usage_bytes + cache_bytes)


def _read_number(file: Path, pattern: str) -> int:
    """Return the number in the first group of a pattern's match in a file; 0 without a match."""
    try:
        match = re.search(pattern, file.read_text(encoding="utf-8"), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) if match else 0


def list_control_groups(controller: str, root: Path, membership: Path) -> tuple[Path, ...]:
    """Return the folders of this process's control group and its parents, in versions 2 and 1.

    `controller` is, for example, `memory`. Version 2 has one tree, version 1 a tree per controller.
    The smallest limit of these groups applies. Some folders may be missing, since the paths of
    groups are those outside of a container, whose root may be another group.
    """
    folders: list[Path] = []
    for controllers, path in _read_memberships(membership):
        if not controllers:
            folders += [*_list_ancestors(root, path), *_list_ancestors(root / "unified", path)]
        elif controller in controllers.split(","):
            folders += _list_ancestors(root / controller, path)
    return tuple(dict.fromkeys((*folders, root, root / controller)))


def _read_memberships(file: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Yield (controllers, path) of each line `number:controllers:path`.

    `controllers` is "" for version 2.
    """
    try:
        lines = file.read_text(encoding="utf-8").splitlines()
    except (OSError, ValueError):
        return
    for line in lines:
        fields = line.split(":", 2)
        if len(fields) == 3:
            yield fields[1], PurePosixPath(fields[2])


def _list_ancestors(root: Path, group: PurePosixPath) -> Iterator[Path]:
    """Yield the folders from a group up to the root; only the root if the group is outside."""
    names = () if ".." in group.parts else group.parts[1:]
    for length in range(len(names), -1, -1):
        yield root.joinpath(*names[:length])
