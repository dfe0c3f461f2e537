"""Control groups of this process, by which a container or a scheduler limits it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path, PurePosixPath

CGROUP = Path("/sys/fs/cgroup")
MEMBERSHIP = Path("/proc/self/cgroup")


def groups_of(
    controller: str, root: Path = CGROUP, membership: Path = MEMBERSHIP
) -> tuple[Path, ...]:
    """The folders of this process's control group and of its parents, in version 2 and 1.

    `controller` is, for example, `memory`; version 2 has one tree, version 1 a tree for each
    controller. The smallest limit of all these groups applies. Some folders may not exist: a
    container may see its own group as the root, whatever its name is outside.
    """
    folders: list[Path] = []
    for controllers, path in _memberships(membership):
        if not controllers:
            folders += [*_upwards(root, path), *_upwards(root / "unified", path)]
        elif controller in controllers.split(","):
            folders += _upwards(root / controller, path)
    return tuple(dict.fromkeys((*folders, root, root / controller)))


def _memberships(file: Path) -> Iterator[tuple[str, PurePosixPath]]:
    """Controllers (none in version 2) and group, from the kernel's `number:controllers:path`."""
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
    """The folders from a group up to the root; the root alone where the group is outside of it."""
    names = () if ".." in group.parts else group.parts[1:]
    for length in range(len(names), -1, -1):
        yield root.joinpath(*names[:length])
