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
    or writes, `waits[i]` are the producers on other streams, `needs[i]` is the all-reduce that task
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
    rounds = _rounds(tasks, producers, {writer for _, _, writer in gradients})
    round_of = {index: number for number, part in enumerate(rounds) for index in part.passes}
    gradient_rounds = [round_of[writer] for _, _, writer in gradients]
    all_reduces = [
        part
        for bucket in buckets(gradients, options.fusion)
        for part in split_rounds(bucket, gradients, gradient_rounds)
    ]
    sources = tuple(
        tuple(sorted({gradients[index][2] for index in bucket.gradients})) for bucket in all_reduces
    )
    needs = _needs(tasks, producers, sources, rounds)
    issued: list[tuple[int, ...]] = [()] * len(tasks)
    for number, writers in enumerate(sources):
        issued[writers[-1]] += (number,)
    return StreamAssignment(
        # Updates in the order in which their gradients are all-reduced, others in program order.
        order=tuple(
            index
            for part in rounds
            for index in (*part.passes, *sorted(part.updates, key=needs.__getitem__))
        ),
        lanes=lanes,
        producers=producers,
        # A stream keeps its order, so only producers on other streams are waited for; AI CPU has
        # several streams.
        waits=tuple(
            tuple(task for task in tasks_before if lanes[task] != lane or lane == "ai_cpu")
            for lane, tasks_before in zip(lanes, producers, strict=True)
        ),
        needs=needs,
        costs_us=tuple(all_reduce_us(part.nbytes, options.devices, hw) for part in all_reduces),
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


def _rounds(
    tasks: Sequence[Task], producers: Sequence[tuple[int, ...]], makers: Collection[int]
) -> tuple[AllReduceRound, ...]:
    """Put off tasks after all-reduces until the passes are over, or until one depends on them.

    A pass depends on an update if an adversary is updated before the other network is trained.
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


def _needs(
    tasks: Sequence[Task],
    producers: Sequence[tuple[int, ...]],
    sources: Sequence[tuple[int, ...]],
    rounds: Sequence[AllReduceRound],
) -> tuple[int, ...]:
    """Return the last all-reduce that each task depends on, itself or through others.

    An update whose gradient is unknown waits for the last all-reduce of its round.
    """
    bucket_of = {writer: number for number, group in enumerate(sources) for writer in group}
    needs = [-1] * len(tasks)
    last = -1
    for part in rounds:
        last = max(last, *(bucket_of.get(index, -1) for index in part.passes), -1)
        for index in part.passes:
            needs[index] = max((needs[before] for before in producers[index]), default=-1)
        for index in part.updates:
            need = max((needs[before] for before in producers[index]), default=-1)
            need = max(need, *(bucket_of.get(before, -1) for before in producers[index]), -1)
            unknown = need < 0 and tasks[index].cost_class == "optimizer"
            needs[index] = last if unknown else need
    return tuple(needs)
