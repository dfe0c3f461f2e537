"""Limits of this process on a shared machine: open files, file sizes, memory and cores."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from pipeline.core.host.memory import (
    list_control_groups,
    read_available_bytes,
    read_process_memory,
)


@dataclass(frozen=True)
class Limits:
    """Resource limits of a process, None without a limit, and the cores and load of its machine."""

    open_files: int | None
    file_bytes: int | None
    address_bytes: int | None
    memory_bytes: int
    """Available memory, under the limits of the machine and of the control groups."""
    cores: float
    """Usable cores, by affinity and by the control groups' quotas."""
    machine_cores: int
    load: float
    """Mean number of runnable processes over the last minute."""


def read_limits() -> Limits:
    """Read the limits of this process."""
    cores = len(os.sched_getaffinity(0))
    quotas = map(_read_quota, list_control_groups("cpu"))
    return Limits(
        open_files=_read_soft_limit(resource.RLIMIT_NOFILE),
        file_bytes=_read_soft_limit(resource.RLIMIT_FSIZE),
        address_bytes=_read_soft_limit(resource.RLIMIT_AS),
        memory_bytes=read_available_bytes(),
        cores=min([cores, *(quota for quota in quotas if quota is not None)]),
        machine_cores=os.cpu_count() or cores,
        load=os.getloadavg()[0],
    )


def find_usable_bytes(process_bytes: int | None = None) -> int:
    """Return how much more memory this process can use.

    It is limited by the available memory, the limit of address space and `process_bytes` of
    resident memory.
    """
    memory = read_process_memory()
    limits = read_limits()
    usable_bytes = [limits.memory_bytes]
    if limits.address_bytes is not None:
        usable_bytes.append(limits.address_bytes - memory.address_bytes)
    if process_bytes is not None:
        usable_bytes.append(process_bytes - memory.resident_bytes)
    return max(0, min(usable_bytes))


def _read_soft_limit(kind: int) -> int | None:
    soft_limit = resource.getrlimit(kind)[0]
    return None if soft_limit == resource.RLIM_INFINITY else soft_limit


def _read_quota(group: Path) -> float | None:
    """Return the cores that a control group, of version 2 or 1, can use; None if not limited."""
    words = _read_words(group / "cpu.max")
    if not words:
        words = _read_words(group / "cpu.cfs_quota_us") + _read_words(group / "cpu.cfs_period_us")
    try:
        quota_us, period_us = map(int, words)
    except ValueError:
        return None
    # Without a limit, the quota is -1 in version 1, and "max" in version 2.
    return quota_us / period_us if quota_us > 0 and period_us > 0 else None


def _read_words(file: Path) -> list[str]:
    try:
        return file.read_text(encoding="utf-8").split()
    except (OSError, ValueError):
        return []
