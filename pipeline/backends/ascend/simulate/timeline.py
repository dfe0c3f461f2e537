"""One steady step on the device: the spans of each stream, and the step's time by kind."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal, get_args

from pipeline.backends.ascend.chip.options import Mode
from pipeline.backends.ascend.chip.tasks import Phase, Task, TaskBound

Stream = Literal["host", "feed", "pcie", "get_next", "compute", "ai_cpu", "hccl"]
Kind = Literal["cube", "vector", "format", "communication", "ai_cpu", "data", "host"]
Bound = Literal[
    "cube", "vector", "memory", "format", "communication", "ai_cpu", "interval", "host launch",
    "host data", "pcie",
]  # fmt: skip
"""Resources that limit a step, or a part of it. `interval` is GetNext and loop control."""

STREAMS: dict[Stream, str] = {
    "host": "Host",
    "feed": "Data pipeline",
    "pcie": "PCIe",
    "get_next": "Step interval",
    "compute": "AI Core",
    "ai_cpu": "AI CPU",
    "hccl": "HCCL",
}
"""Labels of the streams, which are in order from the host to the links."""

KINDS: tuple[Kind, ...] = get_args(Kind)

FORMAT = frozenset({"cast", "trans_data", "transpose", "fill"})
"""Cost classes that convert types or layouts, or clear memory before atomic adds."""


@dataclass(frozen=True, slots=True)
class Span:
    """A time span in which a stream is busy.

    `task` is the index of the task that runs or is launched, `bound` what limits that task's time.
    """

    name: str
    stream: Stream
    start_us: float
    duration_us: float
    kind: Kind
    phase: Phase | None = None
    task: int | None = None
    bound: TaskBound | None = None

    @property
    def end_us(self) -> float:
        """Microseconds from the step's start to the span's end."""
        return self.start_us + self.duration_us


@dataclass(frozen=True, slots=True)
class IterationTrace:
    """An iteration in the terms of MindInsight's step trace.

    `interval_us` is the time before the first forward task (data, launch). `fp_bp_us` is the
    forward and backward pass. `tail_us` is the time of all-reduces and updates after both passes.
    """

    interval_us: float
    fp_bp_us: float
    tail_us: float

    @property
    def iteration_us(self) -> float:
        """Microseconds of the iteration."""
        return self.interval_us + self.fp_bp_us + self.tail_us


@dataclass(frozen=True)
class Timeline:
    """One steady step, from the end of the previous step to the end of this step.

    `spans` are sorted by start within a stream, and include a step's share of a sink's launch.
    `device_us` is the step's work on the device without waits for the host, `host_us` the host's
    time for launches and callbacks. `exposed_us` is the time by kind and sums to `step_us`.
    `launch_us` is the host's time before the `steps_per_launch` steps that a launch runs.
    """

    mode: Mode
    devices: int
    spans: tuple[Span, ...]
    step_us: float
    device_us: float
    host_us: float
    critical_path_us: float
    iteration: IterationTrace
    exposed_us: Mapping[Kind, float]
    bound: Bound
    launch_us: float
    steps_per_launch: int


def classify_time(task: Task) -> Kind:
    """Return the kind of time that a task counts as."""
    if task.engine == "hccl":
        return "communication"
    if task.engine == "ai_cpu":
        return "ai_cpu"
    return "format" if task.cost_class in FORMAT else task.engine
