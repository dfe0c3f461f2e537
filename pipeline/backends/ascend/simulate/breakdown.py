"""What a step's time went to, by kind, and what limits it."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from pipeline.backends.ascend.chip.tasks import Task, TaskGraph, TaskTime
from pipeline.backends.ascend.simulate.streams import Cause, Run
from pipeline.backends.ascend.simulate.timeline import KINDS, Bound, Kind

FORMAT = frozenset({"cast", "trans_data", "transpose", "fill"})
"""Classes that only change a value's form: types, layouts, clearing before atomic adds."""

LIMITS: dict[str, Bound] = {"cube": "cube", "vector": "vector", "memory": "memory", "l2": "memory"}
HOLES: dict[Cause, tuple[Kind, Bound]] = {
    "host": ("host", "host launch"),
    "ai_cpu": ("ai_cpu", "ai_cpu"),
    "communication": ("communication", "communication"),
}


@dataclass(frozen=True, slots=True)
class TimeSlice:
    """Some time that a step takes, to which no other part adds."""

    kind: Kind
    bound: Bound
    us: float


def kind_of(task: Task) -> Kind:
    """The share that a task belongs to."""
    if task.engine == "hccl":
        return "communication"
    if task.engine == "ai_cpu":
        return "ai_cpu"
    return "format" if task.cost_class in FORMAT else task.engine


def parts_of(graph: TaskGraph, times: Sequence[TaskTime], run: Run) -> Iterator[TimeSlice]:
    """A run's end, taken apart: compute tasks and what the AI Cores stood still for."""
    for task, time, us in zip(graph.tasks, times, run.compute_us, strict=True):
        if us:
            kind = kind_of(task)
            # A task at its floor is short of nothing but size; its engine stands for it.
            own: Bound = "cube" if kind == "cube" else "vector"
            yield TimeSlice(kind, "format" if kind == "format" else LIMITS.get(time.bound, own), us)
    for cause, us in run.holes_us.items():
        yield TimeSlice(*HOLES[cause], us)


def exposed_of(parts: Sequence[TimeSlice]) -> dict[Kind, float]:
    """Time by kind, in us; what is hidden behind something else is not in it."""
    exposed: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    for part in parts:
        exposed[part.kind] += part.us
    return exposed


def bound_of(parts: Sequence[TimeSlice]) -> Bound:
    """What the largest part of the time is bound by; the first of equals."""
    limits: dict[Bound, float] = {}
    for part in parts:
        limits[part.bound] = limits.get(part.bound, 0.0) + part.us
    return max(limits, key=limits.__getitem__)


def busy_of(graph: TaskGraph, run: Run) -> dict[Kind, float]:
    """How long each kind of task is at work on the device, in us, hidden or not."""
    busy: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    for index, task in enumerate(graph.tasks):
        busy[kind_of(task)] += run.compute_us[index] or run.ends_us[index] - run.starts_us[index]
    busy["communication"] += sum(end - start for start, end in run.buckets_us)
    return busy
