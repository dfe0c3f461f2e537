"""Which stream a task runs on, in what order, and what it has to wait for."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

from pipeline.backends.ascend.collectives import (
    Bucket,
    all_reduce_us,
    buckets,
    check_devices,
    split_before,
)
from pipeline.backends.ascend.hardware import Hardware
from pipeline.backends.ascend.options import StepOptions
from pipeline.backends.ascend.tasks import Task, TaskGraph

Lane = Literal["compute", "ai_cpu", "hccl"]
LANES: dict[str, Lane] = {"ai_cpu": "ai_cpu", "hccl": "hccl"}
TAIL = frozenset({"optimizer", "communication"})
"""Phases of what comes after an all-reduce: re-forming what it gave, and the update."""

NEVER = 1 << 62


@dataclass(frozen=True, slots=True)
class Plan:
    """A graph's tasks on streams.

    `order` has the tasks as they are launched. `producers[i]` made what task i reads or writes,
    `waits[i]` those of them that run elsewhere, `needs[i]` is the all-reduce that task i waits
    for, or -1. `costs_us` and `sources` are by all-reduce: its time alone, and the tasks that
    make its gradients; `issued_after[i]` are the all-reduces that can start once i has run.
    """

    order: tuple[int, ...]
    lanes: tuple[Lane, ...]
    producers: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    buckets: tuple[Bucket, ...]
    costs_us: tuple[float, ...]
    sources: tuple[tuple[int, ...], ...]
    issued_after: tuple[tuple[int, ...], ...]


def make_plan(graph: TaskGraph, options: StepOptions, hw: Hardware) -> Plan:
    """Streams, order and dependencies; nothing in it depends on how long a task takes.

    Raises:
        OptionError: the number of devices or the fusion of gradients makes no sense.
    """
    check_devices(options.devices, hw)
    tasks = graph.tasks
    lanes: tuple[Lane, ...] = tuple(LANES.get(task.engine, "compute") for task in tasks)
    producers = _producers(tasks)
    together = _buckets(graph, producers, options) if options.devices > 1 else ()
    sources = tuple(
        tuple(sorted({graph.gradients[index][2] for index in bucket.gradients}))
        for bucket in together
    )
    needs = _needs(tasks, producers, sources)
    issued: list[tuple[int, ...]] = [()] * len(tasks)
    for number, made_by in enumerate(sources):
        issued[made_by[-1]] += (number,)
    return Plan(
        order=_order(tasks, needs),
        lanes=lanes,
        producers=producers,
        waits=_waits(lanes, producers),
        needs=needs,
        buckets=together,
        costs_us=tuple(all_reduce_us(one.nbytes, options.devices, hw) for one in together),
        sources=sources,
        issued_after=tuple(issued),
    )


def _producers(tasks: Sequence[Task]) -> tuple[tuple[int, ...], ...]:
    """The last tasks before each that wrote a buffer which it reads, or writes into."""
    writer: dict[int, int] = {}
    found = []
    for index, task in enumerate(tasks):
        touched = [writer[buffer] for buffer in task.reads if buffer in writer]
        touched += [writer[buffer] for buffer in task.writes if buffer in writer]
        found.append(tuple(dict.fromkeys(touched)))
        for buffer in task.writes:
            writer[buffer] = index
    return tuple(found)


def _waits(
    lanes: Sequence[Lane], producers: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """A stream keeps its own order, so only other streams are waited for; AI CPU has several."""
    return tuple(
        tuple(one for one in made_by if lanes[one] != lane or lane == "ai_cpu")
        for lane, made_by in zip(lanes, producers, strict=True)
    )


def _buckets(
    graph: TaskGraph, producers: Sequence[tuple[int, ...]], options: StepOptions
) -> tuple[Bucket, ...]:
    used_at: dict[int, int] = {}
    for index, task in enumerate(graph.tasks):
        if task.phase in TAIL:
            for producer in producers[index]:
                used_at.setdefault(producer, index)
    used = [used_at.get(made_by, NEVER) for _, _, made_by in graph.gradients]
    return tuple(
        part
        for bucket in buckets(graph.gradients, options.fusion)
        for part in split_before(bucket, graph.gradients, used)
    )


def _needs(
    tasks: Sequence[Task], producers: Sequence[tuple[int, ...]], sources: Sequence[tuple[int, ...]]
) -> tuple[int, ...]:
    """The last all-reduce that each task depends on, itself or through others.

    An update whose gradient can't be told waits for the last all-reduce before it.
    """
    bucket_of = {made_by: number for number, group in enumerate(sources) for made_by in group}
    complete_at = {max(made_by): number for number, made_by in enumerate(sources)}
    needs: list[int] = []
    latest = -1
    for index, task in enumerate(tasks):
        need = max((needs[one] for one in producers[index]), default=-1)
        if task.phase in TAIL:
            need = max(need, *(bucket_of.get(one, -1) for one in producers[index]), -1)
            if task.cost_class == "optimizer" and need < 0:
                need = latest
        needs.append(need)
        latest = complete_at.get(index, latest)
    return tuple(needs)


def _order(tasks: Sequence[Task], needs: Sequence[int]) -> tuple[int, ...]:
    """Updates in the order in which their gradients are all-reduced; all else as it was."""
    order: list[int] = []
    run: list[int] = []
    for index, task in enumerate(tasks):
        if task.phase in TAIL:
            run.append(index)
            continue
        order += [*sorted(run, key=needs.__getitem__), index]
        run = []
    return (*order, *sorted(run, key=needs.__getitem__))
