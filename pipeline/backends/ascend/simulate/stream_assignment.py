"""Streams of tasks, their order, and the tasks that each has to wait for."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from typing import Literal

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import StepOptions
from pipeline.backends.ascend.chip.tasks import Task, TaskGraph
from pipeline.backends.ascend.cost.collectives import (
    Bucket,
    Gradient,
    all_reduce_us,
    buckets,
    check_devices,
    split_rounds,
)

Lane = Literal["compute", "ai_cpu", "hccl"]
LANES: dict[str, Lane] = {"ai_cpu": "ai_cpu", "hccl": "hccl"}
TAIL = frozenset({"optimizer", "communication"})
"""Phases after an all-reduce: layout of the result, and the update."""


@dataclass(frozen=True, slots=True)
class StreamAssignment:
    """A graph's tasks on streams.

    `order` has the tasks as they are launched. `producers[i]` wrote the buffers that task i reads
    or writes, `waits[i]` are those of them on other streams, `needs[i]` is the all-reduce that task
    i waits for, or -1. `costs_us` and `sources` are by all-reduce: its time alone, and the tasks
    that compute its gradients; `issued_after[i]` are the all-reduces that can start once i has run.
    """

    order: tuple[int, ...]
    lanes: tuple[Lane, ...]
    producers: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    costs_us: tuple[float, ...]
    sources: tuple[tuple[int, ...], ...]
    issued_after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AllReduceRound:
    """Passes that compute gradients, then the updates that use them. Most steps have one round."""

    passes: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)


def assign_streams(graph: TaskGraph, options: StepOptions, hw: Hardware) -> StreamAssignment:
    """Return streams, order and dependencies, which don't depend on the tasks' times.

    Raises:
        OptionError: the number of devices or the fusion of gradients makes no sense.
    """
    check_devices(options.devices, hw)
    tasks = graph.tasks
    lanes: tuple[Lane, ...] = tuple(LANES.get(task.engine, "compute") for task in tasks)
    producers = _producers(tasks)
    gradients = sorted(graph.gradients, key=itemgetter(2)) if options.devices > 1 else []
    rounds = _rounds(tasks, producers, {made_by for _, _, made_by in gradients})
    together = _together(gradients, rounds, options)
    sources = tuple(
        tuple(sorted({gradients[index][2] for index in bucket.gradients})) for bucket in together
    )
    needs = _needs(tasks, producers, sources, rounds)
    issued: list[tuple[int, ...]] = [()] * len(tasks)
    for number, made_by in enumerate(sources):
        issued[made_by[-1]] += (number,)
    return StreamAssignment(
        order=_order(rounds, needs),
        lanes=lanes,
        producers=producers,
        waits=_waits(lanes, producers),
        needs=needs,
        costs_us=tuple(all_reduce_us(one.nbytes, options.devices, hw) for one in together),
        sources=sources,
        issued_after=tuple(issued),
    )


def _producers(tasks: Sequence[Task]) -> tuple[tuple[int, ...], ...]:
    """Return the last tasks before each that wrote a buffer which it reads, or writes into."""
    writer: dict[int, int] = {}
    producers = []
    for index, task in enumerate(tasks):
        touched = [writer[buffer] for buffer in task.reads if buffer in writer]
        touched += [writer[buffer] for buffer in task.writes if buffer in writer]
        producers.append(tuple(dict.fromkeys(touched)))
        for buffer in task.writes:
            writer[buffer] = index
    return tuple(producers)


def _waits(
    lanes: Sequence[Lane], producers: Sequence[tuple[int, ...]]
) -> tuple[tuple[int, ...], ...]:
    """Return producers on other streams, as a stream keeps its own order; AI CPU has several."""
    return tuple(
        tuple(one for one in made_by if lanes[one] != lane or lane == "ai_cpu")
        for lane, made_by in zip(lanes, producers, strict=True)
    )


def _rounds(
    tasks: Sequence[Task], producers: Sequence[tuple[int, ...]], makers: Collection[int]
) -> tuple[AllReduceRound, ...]:
    """Put off tasks after all-reduces until the passes are over, or until one depends on them.

    A pass depends on an update where an adversary is updated before the other network is trained.
    """
    rounds = [AllReduceRound()]
    put_off: set[int] = set()
    for index, task in enumerate(tasks):
        if task.phase in TAIL and index not in makers:
            rounds[-1].updates.append(index)
            put_off.add(index)
            continue
        if not put_off.isdisjoint(producers[index]):
            rounds.append(AllReduceRound())
            put_off.clear()
        rounds[-1].passes.append(index)
    return tuple(rounds)


def _together(
    gradients: Sequence[Gradient], rounds: Sequence[AllReduceRound], options: StepOptions
) -> tuple[Bucket, ...]:
    round_of = {index: number for number, one in enumerate(rounds) for index in one.passes}
    made_in = [round_of[made_by] for _, _, made_by in gradients]
    return tuple(
        part
        for bucket in buckets(gradients, options.fusion)
        for part in split_rounds(bucket, gradients, made_in)
    )


def _needs(
    tasks: Sequence[Task],
    producers: Sequence[tuple[int, ...]],
    sources: Sequence[tuple[int, ...]],
    rounds: Sequence[AllReduceRound],
) -> tuple[int, ...]:
    """Return the last all-reduce that each task depends on, itself or through others.

    An update whose gradient is unknown waits for the last all-reduce of its round.
    """
    bucket_of = {made_by: number for number, group in enumerate(sources) for made_by in group}
    needs = [-1] * len(tasks)
    last = -1
    for one in rounds:
        last = max(last, *(bucket_of.get(index, -1) for index in one.passes), -1)
        for index in one.passes:
            needs[index] = max((needs[before] for before in producers[index]), default=-1)
        for index in one.updates:
            need = max((needs[before] for before in producers[index]), default=-1)
            need = max(need, *(bucket_of.get(before, -1) for before in producers[index]), -1)
            unknown = need < 0 and tasks[index].cost_class == "optimizer"
            needs[index] = last if unknown else need
    return tuple(needs)


def _order(rounds: Sequence[AllReduceRound], needs: Sequence[int]) -> tuple[int, ...]:
    """Return updates in the order in which their gradients are all-reduced, others in program
    order.
    """
    return tuple(
        index
        for one in rounds
        for index in (*one.passes, *sorted(one.updates, key=needs.__getitem__))
    )
