"""Limits of this process on a shared machine: files, memory, cores."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.host.memory import CGROUP, MEMBERSHIP, available_bytes, groups_of


@dataclass(frozen=True)
class Limits:
    """Resource limits of a process; None if there is no limit or it is unknown."""

    open_files: int | None
    file_bytes: int | None
    address_bytes: int | None
    memory_bytes: int
    """Available now, under the limits of the machine and of the control groups."""
    cores: float
    """Usable cores, by affinity and by the control groups' quotas."""
    machine_cores: int
    load: float
    """Mean number of runnable processes over the last minute."""


def read_limits(cgroup: Path = CGROUP, membership: Path = MEMBERSHIP) -> Limits:
    """Read the limits of this process."""
    cores = len(os.sched_getaffinity(0))
    shares = map(_cores_of, groups_of("cpu", cgroup, membership))
    return Limits(
        open_files=_soft(resource.RLIMIT_NOFILE),
        file_bytes=_soft(resource.RLIMIT_FSIZE),
        address_bytes=_soft(resource.RLIMIT_AS),
        memory_bytes=available_bytes(cgroup, membership),
        cores=min([cores, *(share for share in shares if share is not None)]),
        machine_cores=os.cpu_count() or cores,
        load=os.getloadavg()[0],
    )


def _soft(limit: int) -> int | None:
    soft = resource.getrlimit(limit)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cores_of(group: Path) -> float | None:
    """The cores that a control group, of version 2 or 1, may use; None without a limit."""
    share = _read_words(group / "cpu.max")
    if not share:
        share = _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
    try:
        used_us, period_us = map(int, share)
    except ValueError:
        return None
    # -1 stands for no limit in version 1, and "max" in version 2.
    return used_us / period_us if used_us > 0 and period_us > 0 else None


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
