"""Measurement of a call's time by the shortest of several calls, and the load of the machine by
other programs, which makes measured times longer."""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import jax

from pipeline.core.host.limits import read_limits

STAT = Path("/proc/stat")
IDLE = (3, 4)
"""Positions of the idle times, without and with pending input, among the times in `STAT`."""
MIN_WATCHED_S = 0.2
"""Least seconds over which load is computed, since `STAT` counts in hundredths of a second."""
NOTABLE_SHARE = 0.25
"""Share of this process's cores from which their use by other programs is reported."""


def read_machine_s() -> float | None:
    """Return the processor seconds of all programs since the machine started; None if unknown."""
    try:
        line = STAT.read_text().split("\n", 1)[0].split()
        # The last two, of virtual machines that run here, are counted in the first two already.
        ticks = list(map(int, line[1:9]))
    except (OSError, ValueError):
        return None
    busy = sum(count for place, count in enumerate(ticks) if place not in IDLE)
    return busy / os.sysconf("SC_CLK_TCK") if ticks else None


def read_process_s() -> float:
    """Return the processor seconds of this process and of its ended children."""
    times = os.times()
    return times.user + times.system + times.children_user + times.children_system


@dataclass(frozen=True)
class LoadWatch:
    """The start of a measurement, during which other programs may use cores."""

    started_s: float = field(default_factory=time.monotonic)
    machine_s: float | None = field(default_factory=read_machine_s)
    process_s: float = field(default_factory=read_process_s)

    def count_foreign_cores(self) -> float:
        """Return the mean number of cores that other programs have used since the start, beyond
        those that this process can't use; 0.0 if the system doesn't tell or too little time has
        passed."""
        seconds = time.monotonic() - self.started_s
        machine_s = read_machine_s()
        if self.machine_s is None or machine_s is None or seconds < MIN_WATCHED_S:
            return 0.0
        foreign_s = machine_s - self.machine_s - (read_process_s() - self.process_s)
        limits = read_limits()
        return max(0.0, foreign_s / seconds - (limits.machine_cores - limits.cores))


def describe_load(foreign_cores: float, cores: float) -> str | None:
    """Return a sentence on the load by other programs; None if it is a small part of the `cores`
    that this process can use."""
    if foreign_cores < NOTABLE_SHARE * cores:
        return None
    return (
        f"other programs used {foreign_cores:.1f} of {cores:g} cores meanwhile, so these times are "
        "longer than on an idle machine"
    )


LEAST_CALLS = 3


def measure_shortest_s(call: Callable[..., Any], *arguments: Any, budget_s: float) -> float:
    """Return the shortest time in seconds of at least three calls, in about `budget_s` seconds."""
    jax.block_until_ready(call(*arguments))  # Compiles.
    times_s: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times_s) < LEAST_CALLS or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
