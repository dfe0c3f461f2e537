"""A step's time by kind, and the resource that limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph, TaskTime
from pipeline.backends.ascend.simulate.streams import Cause, Run
from pipeline.backends.ascend.simulate.timeline import KINDS, Bound, Kind

FORMAT = frozenset({"cast", "trans_data", "transpose", "fill"})
"""Classes that only convert types or layouts, or clear memory before atomic adds."""

LIMITS: dict[str, Bound] = {"cube": "cube", "vector": "vector", "memory": "memory", "l2": "memory"}
HOLES: dict[Cause, tuple[Kind, Bound]] = {
    "host": ("host", "host launch"),
    "ai_cpu": ("ai_cpu", "ai_cpu"),
    "communication": ("communication", "communication"),
}


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """A slice of a step's time that overlaps no other slice."""

    kind: Kind
    bound: Bound
    us: float


def kind_of(task: Task) -> Kind:
    """Return the kind of time that a task counts as."""
    if task.engine == "hccl":
        return "communication"
    if task.engine == "ai_cpu":
        return "ai_cpu"
    return "format" if task.cost_class in FORMAT else task.engine


def parts_of(graph: TaskGraph, times: Sequence[TaskTime], run: Run) -> Iterator[TimeSlice]:
    """Return the slices of a run: compute tasks, and the causes of the AI Cores' idle time."""
    for task, time, us in zip(graph.tasks, times, run.compute_us, strict=True):
        if us:
            kind = kind_of(task)
            # A task at its floor is short of nothing but size; its engine stands for it.
            own: Bound = "cube" if kind == "cube" else "vector"
            yield TimeSlice(kind, "format" if kind == "format" else LIMITS.get(time.bound, own), us)
    for cause, us in run.holes_us.items():
        yield TimeSlice(*HOLES[cause], us)


def exposed_of(parts: Sequence[TimeSlice]) -> dict[Kind, float]:
    """Return time by kind, in us; overlapped time counts 0."""
    exposed: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    for part in parts:
        exposed[part.kind] += part.us
    return exposed


def bound_of(parts: Sequence[TimeSlice]) -> Bound:
    """Return the bound of the largest slice of the time; the first of equals."""
    limits: dict[Bound, float] = {}
    for part in parts:
        limits[part.bound] = limits.get(part.bound, 0.0) + part.us
    return max(limits, key=limits.__getitem__)


def busy_of(graph: TaskGraph, run: Run) -> dict[Kind, float]:
    """Return the device time of each kind of task, in us, overlapped time included."""
    busy: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    for index, task in enumerate(graph.tasks):
        busy[kind_of(task)] += run.compute_us[index] or run.ends_us[index] - run.starts_us[index]
    busy["communication"] += sum(end - start for start, end in run.buckets_us)
    return busy
