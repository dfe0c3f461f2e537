"""What a shared machine lets this process have: files, memory, cores."""

from __future__ import annotations

import os
import resource
from dataclasses import dataclass
from pathlib import Path

from pipeline.host_memory import CGROUP, available_bytes


@dataclass(frozen=True)
class Limits:
    """None where there is no limit, or it can't be told."""

    open_files: int | None
    file_bytes: int | None
    address_bytes: int | None
    memory_bytes: int
    """That can be had now, under the machine's and the cgroup's limit."""
    cores: float
    """That may be used, by affinity and by the cgroup's share."""
    machine_cores: int
    load: float
    """Processes that wanted a core, over the last minute."""


def read_limits(cgroup: Path = CGROUP) -> Limits:
    """The limits of this process."""
    cores = len(os.sched_getaffinity(0))
    return Limits(
        open_files=_soft(resource.RLIMIT_NOFILE),
        file_bytes=_soft(resource.RLIMIT_FSIZE),
        address_bytes=_soft(resource.RLIMIT_AS),
        memory_bytes=available_bytes(cgroup),
        cores=min(cores, _cgroup_cores(cgroup) or cores),
        machine_cores=os.cpu_count() or cores,
        load=os.getloadavg()[0],
    )


def _soft(limit: int) -> int | None:
    soft = resource.getrlimit(limit)[0]
    return None if soft == resource.RLIM_INFINITY else soft


def _cgroup_cores(cgroup: Path) -> float | None:
    """The share of time, in microseconds of a period of so many."""
    try:
        share, period = (cgroup / "cpu.max").read_text(encoding="utf-8").split()
        return int(share) / int(period)
    except (OSError, ValueError):
        return None
