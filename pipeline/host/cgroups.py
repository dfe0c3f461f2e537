"""The control groups that a process is in, by which a container or a scheduler limits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(
    controller: str, root: Path = CGROUP, membership: Path = MEMBERSHIP
) -> tuple[Path, ...]:
    """The folders of this process's group and of all that it lies in, by either version.

    `controller` is such as `memory`; groups of version 2 share one tree, of version 1 each
    controller has its own. A limit of any of them holds, the smallest counts. Not every folder is
    there: a container may see its own group as the root, under whatever name it has outside.
    """
    folders: list[Path] = []
    for controllers, path in _memberships(membership):
        if not controllers:
            folders += [*_upwards(root, path), *_upwards(root / "unified", path)]
        elif controller in controllers.split(","):
            folders += _upwards(root / controller, path)
    return tuple(dict.fromkeys((*folders, root, root / controller)))


def _memberships(file: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Controllers, none in version 2, and the group, by the kernel's `number:controllers:path`."""
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
    """From a group up to the root; from the root alone where the group lies outside of it."""
    names = () if ".." in group.parts else group.parts[1:]
    for length in range(len(names), -1, -1):
        yield root.joinpath(*names[:length])
