"""Tasks on the device's streams: their order and dependencies, and their start and end.

Every start is a maximum over earlier ends, plus constants (max-plus). So a delay never makes
another task earlier, and launching op by op is never faster than launching the graph at once.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass, field, replace
from functools import cache
from operator import itemgetter
from typing import Literal

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import StepOptions
from pipeline.backends.ascend.chip.tasks import Task, TaskGraph, TaskTime
from pipeline.backends.ascend.cost.collectives import all_reduce_us, check_devices, form_buckets
from pipeline.backends.ascend.simulate.timeline import Span

DeviceStream = Literal["compute", "ai_cpu", "hccl"]
ENGINE_STREAMS: dict[str, DeviceStream] = {"ai_cpu": "ai_cpu", "hccl": "hccl"}
TAIL = frozenset({"optimizer", "communication"})
"""Phases after an all-reduce: conversions of its result, and updates."""
Cause = Literal["host", "ai_cpu", "communication"]
"""Cause for which the AI Cores wait while they are idle."""
CAUSES: dict[DeviceStream, Cause] = {"ai_cpu": "ai_cpu", "hccl": "communication"}


@dataclass(frozen=True, slots=True)
class StreamAssignment:
    """A graph's tasks on streams. Tasks and all-reduces are indices.

    `order` has the tasks in the order of their launches. `producers[i]` are the last writers of the
    buffers that task i reads or writes, `waits[i]` the producers on other streams. `needs[i]` is
    the all-reduce that task i waits for, or -1. `issued_after[i]` are the all-reduces that can
    start when task i ends. `costs_us[j]` is the time of all-reduce j without other work,
    `sources[j]` the tasks that compute its gradients.
    """

    order: tuple[int, ...]
    streams: tuple[DeviceStream, ...]
    producers: tuple[tuple[int, ...], ...]
    waits: tuple[tuple[int, ...], ...]
    needs: tuple[int, ...]
    costs_us: tuple[float, ...]
    sources: tuple[tuple[int, ...], ...]
    issued_after: tuple[tuple[int, ...], ...]


@dataclass(frozen=True, slots=True)
class AllReduceRound:
    """Tasks that compute gradients, then tasks that update. Most steps have one round."""

    passes: list[int] = field(default_factory=list)
    updates: list[int] = field(default_factory=list)


def assign_streams(graph: TaskGraph, options: StepOptions, hw: Hardware) -> StreamAssignment:
    """Return streams, order and dependencies, which don't depend on the tasks' times.

    Raises OptionError for an impossible number of devices or fusion of gradients.
    """
    check_devices(options.devices, hw)
    tasks = graph.tasks
    streams: tuple[DeviceStream, ...] = tuple(
        ENGINE_STREAMS.get(task.engine, "compute") for task in tasks
    )
    producers = _find_producers(tasks)
    gradients = sorted(graph.gradients, key=itemgetter(2)) if options.devices > 1 else []
    rounds = _form_rounds(tasks, producers, {writer for _, _, writer in gradients})
    round_of = {index: number for number, round_ in enumerate(rounds) for index in round_.passes}
    gradient_rounds = [round_of[writer] for _, _, writer in gradients]
    buckets = form_buckets(options.fusion, gradient_rounds)
    sources = tuple(tuple(sorted({gradients[index][2] for index in bucket})) for bucket in buckets)
    sizes = [sum(gradients[index][1] for index in bucket) for bucket in buckets]
    exchanges = options.exchange_bytes if sources else ()
    sources += sources[-1:] * len(exchanges)
    needs = _find_needs(tasks, producers, sources, rounds)
    if exchanges:
        # Curvature is used by all updates.
        needs = tuple(
            len(sources) - 1 if task.phase in TAIL else need
            for task, need in zip(tasks, needs, strict=True)
        )
    issued: list[tuple[int, ...]] = [()] * len(tasks)
    for number, writers in enumerate(sources):
        issued[writers[-1]] += (number,)
    return StreamAssignment(
        # Passes are in program order, updates in the order in which gradients are all-reduced.
        order=tuple(
            index
            for round_ in rounds
            for index in (*round_.passes, *sorted(round_.updates, key=needs.__getitem__))
        ),
        streams=streams,
        producers=producers,
        # A stream keeps its order, so tasks wait only for other streams. AI CPU tasks wait for one
        # another by events too.
        waits=tuple(
            tuple(before for before in writers if streams[before] != stream or stream == "ai_cpu")
            for stream, writers in zip(streams, producers, strict=True)
        ),
        needs=needs,
        costs_us=tuple(
            all_reduce_us(nbytes, options.devices, hw) for nbytes in (*sizes, *exchanges)
        ),
        sources=sources,
        issued_after=tuple(issued),
    )


def _find_producers(tasks: Sequence[Task]) -> tuple[tuple[int, ...], ...]:
    """Return, for each task, the last earlier writers of the buffers that it reads or writes."""
    writer: dict[int, int] = {}
    producers = []
    for index, task in enumerate(tasks):
        writers = (writer[buffer] for buffer in (*task.reads, *task.writes) if buffer in writer)
        producers.append(tuple(dict.fromkeys(writers)))
        for buffer in task.writes:
            writer[buffer] = index
    return tuple(producers)


def _form_rounds(
    tasks: Sequence[Task], producers: Sequence[tuple[int, ...]], makers: Collection[int]
) -> tuple[AllReduceRound, ...]:
    """Move updates to the end, but before a pass that depends on them.

    A pass depends on an update if an adversary is updated before the other network is trained.
    `makers` are the tasks that compute gradients.
    """
    rounds = [AllReduceRound()]
    deferred: set[int] = set()
    for index, task in enumerate(tasks):
        if task.phase in TAIL and index not in makers:
            rounds[-1].updates.append(index)
            deferred.add(index)
            continue
        if not deferred.isdisjoint(producers[index]):
            rounds.append(AllReduceRound())
            deferred.clear()
        rounds[-1].passes.append(index)
    return tuple(rounds)


def _find_needs(
    tasks: Sequence[Task],
    producers: Sequence[tuple[int, ...]],
    sources: Sequence[tuple[int, ...]],
    rounds: Sequence[AllReduceRound],
) -> tuple[int, ...]:
    """Return the last all-reduce that each task depends on, directly or through other tasks.

    An update whose gradient is unknown waits for the last all-reduce of its round.
    """
    bucket_of = {writer: number for number, group in enumerate(sources) for writer in group}
    needs = [-1] * len(tasks)
    last = -1
    for round_ in rounds:
        last = max(last, *(bucket_of.get(index, -1) for index in round_.passes), -1)
        for index in round_.passes:
            needs[index] = max((needs[before] for before in producers[index]), default=-1)
        for index in round_.updates:
            need = max((needs[before] for before in producers[index]), default=-1)
            need = max(need, *(bucket_of.get(before, -1) for before in producers[index]), -1)
            is_unknown = need < 0 and tasks[index].cost_class == "optimizer"
            needs[index] = last if is_unknown else need
    return tuple(needs)


@dataclass(frozen=True, slots=True)
class LaunchTimes:
    """Times at which the host has launched each task and each all-reduce of a step.

    `op_us` is the time of one launch, `end_us` the end of the last launch.
    """

    tasks_us: tuple[float, ...]
    buckets_us: tuple[float, ...]
    op_us: float
    end_us: float

    def shift_earlier(self, us: float, hw: Hardware) -> LaunchTimes:
        """Return the launches `us` earlier, but not before the first one can reach the device."""
        least_us = hw.graph_launch_us
        return replace(
            self,
            tasks_us=tuple(max(least_us, launch_us - us) for launch_us in self.tasks_us),
            buckets_us=tuple(max(least_us, launch_us - us) for launch_us in self.buckets_us),
        )


def compute_launch_times(
    graph: TaskGraph, plan: StreamAssignment, op_launch_us: float, hw: Hardware
) -> LaunchTimes:
    """Return op-by-op launch times. The first launch takes at least as long as a graph's launch.

    Each iteration of a scan is a launch, and each all-reduce after its last gradient. GetNext isn't
    a launch, as the host copies the batch between steps, nor is a conversion inside an op.
    """
    tasks_us = [0.0] * len(graph.tasks)
    buckets_us = [0.0] * len(plan.costs_us)
    host_us = max(hw.graph_launch_us, op_launch_us) - op_launch_us
    for index in plan.order:
        task = graph.tasks[index]
        if not task.launched:
            tasks_us[index] = host_us
            continue
        tasks_us[index] = host_us + op_launch_us
        host_us += task.repeat * op_launch_us if task.phase != "data" else 0.0
        for bucket in plan.issued_after[index]:
            host_us += op_launch_us
            buckets_us[bucket] = host_us
    end_us = max(host_us, hw.graph_launch_us)
    return LaunchTimes(tuple(tasks_us), tuple(buckets_us), op_launch_us, end_us)


def form_launch_spans(
    graph: TaskGraph, plan: StreamAssignment, launches: LaunchTimes, begin_us: float, step_us: float
) -> Iterator[Span]:
    """Yield the spans of the host's launches in a steady step.

    `begin_us` is the time at which the launches of this step began, negative if the host is ahead.
    Launches for the next step are then at the end of the step.
    """
    at_us = 0.0
    for index in plan.order:
        task = graph.tasks[index]
        task_launches: list[tuple[str, int | None, float]] = []
        if task.phase != "data" and task.launched:
            last_us = launches.tasks_us[index] + launches.op_us * (task.repeat - 1)
            task_launches.append((f"Launch {task.type}", index, last_us))
        task_launches += [
            ("Launch AllReduce", None, launches.buckets_us[bucket])
            for bucket in plan.issued_after[index]
        ]
        for name, number, end_us in task_launches:
            us = end_us - at_us
            span = Span(name, "host", begin_us + at_us, us, "host", task.phase, number)
            yield from wrap_span(span, step_us)
            at_us += us


def wrap_span(span: Span, step_us: float) -> Iterator[Span]:
    """Yield a span, which repeats every step, as two parts between 0 and the step's end."""
    start_us = span.start_us % step_us
    over_us = max(0.0, start_us + span.duration_us - step_us)
    yield replace(span, start_us=start_us, duration_us=span.duration_us - over_us)
    yield replace(span, start_us=0.0, duration_us=over_us)


class Run:
    """A simulated step: times of its tasks and all-reduces, from the earliest start of the step.

    `compute_us[i]` is the time for which task i keeps the AI Cores busy, with the gap before each
    kernel. `idle_us` is the AI Cores' idle time by cause. Busy and idle time add up to `end_us`.
    The host launches op by op at the times `launches`; None: all at once.
    """

    def __init__(
        self,
        graph: TaskGraph,
        times: Sequence[TaskTime],
        plan: StreamAssignment,
        hw: Hardware,
        launches: LaunchTimes | None = None,
    ) -> None:
        count = len(graph.tasks)
        self.tasks = graph.tasks
        self.times = times
        self.plan = plan
        self.hw = hw
        self.launches = launches
        self.starts_us = [0.0] * count
        self.ends_us = [0.0] * count
        self.compute_us = [0.0] * count
        self.idle_us: dict[Cause, float] = {"host": 0.0, "ai_cpu": 0.0, "communication": 0.0}
        self.buckets_us: list[tuple[float, float]] = []
        """Start and end of each all-reduce."""
        self.free: dict[DeviceStream, float] = {"compute": 0.0, "ai_cpu": 0.0, "hccl": 0.0}
        """End of the last task or all-reduce of each stream."""
        for index in plan.order:
            if plan.streams[index] == "compute":
                self.run_compute(index)
            else:
                self.run_beside(index)
        self.end_us = self.finish()

    def run_compute(self, index: int) -> None:
        """Run a task on the AI Cores."""
        start_us, cause = self.find_start(index)
        free_us = self.free["compute"]
        if start_us > free_us:
            self.idle_us[cause] += start_us - free_us
            free_us = start_us
        iteration_us = self.times[index].us + self.hw.task_gap_us
        self.starts_us[index] = free_us + self.hw.task_gap_us
        self.compute_us[index] = iteration_us * self.tasks[index].repeat
        wait_us = self.sum_iterations_us(index, iteration_us) - self.compute_us[index]
        self.idle_us["host"] += wait_us
        self.ends_us[index] = free_us + (self.compute_us[index] + wait_us)
        self.free["compute"] = self.ends_us[index]

    def run_beside(self, index: int) -> None:
        """Run a task on the AI CPU, or a collective of the graph on the links.

        The AI CPU has one stream, which runs both dropout masks in TRACE-23.
        """
        stream = self.plan.streams[index]
        start_us, _ = self.find_start(index)
        if stream == "hccl":
            start_us += self.hw.collective_launch_us
        self.starts_us[index] = max(start_us, self.free[stream])
        us = self.sum_iterations_us(index, self.times[index].us)
        self.ends_us[index] = self.starts_us[index] + us
        self.free[stream] = self.ends_us[index]

    def sum_iterations_us(self, index: int, iteration_us: float) -> float:
        """Return the time of all iterations of a scan's task. The host launches each iteration."""
        op_us = self.launches.op_us if self.launches else 0.0
        return iteration_us + (self.tasks[index].repeat - 1) * max(iteration_us, op_us)

    def find_start(self, index: int) -> tuple[float, Cause]:
        """Return the earliest start of a task, and the cause of the wait until then."""
        start_us = self.launches.tasks_us[index] if self.launches else 0.0
        cause: Cause = "host"
        for producer in self.plan.waits[index]:
            # The step's interval includes the handover from GetNext.
            fetches = self.tasks[producer].phase == "data"
            ready_us = self.ends_us[producer] + (0.0 if fetches else self.hw.event_handover_us)
            if ready_us > start_us:
                start_us = ready_us
                cause = CAUSES.get(self.plan.streams[producer], "host")
        need = self.plan.needs[index]
        if need >= 0:
            self.reduce_until(need)
            ready_us = self.buckets_us[need][1] + self.hw.event_handover_us
            if ready_us > start_us:
                return ready_us, "communication"
        return start_us, cause

    def reduce_until(self, last: int) -> None:
        """Run the all-reduces up to number `last` that haven't run yet."""
        for number in range(len(self.buckets_us), last + 1):
            ready_us = max(self.ends_us[index] for index in self.plan.sources[number])
            if self.launches:
                ready_us = max(ready_us, self.launches.buckets_us[number])
            start_us = max(ready_us + self.hw.collective_launch_us, self.free["hccl"])
            self.free["hccl"] = self.find_all_reduce_end(start_us, self.plan.costs_us[number])
            self.buckets_us.append((start_us, self.free["hccl"]))

    def find_all_reduce_end(self, start_us: float, alone_us: float) -> float:
        """Return the end of an all-reduce, which is slower while the AI Cores compute."""
        slowdown = max(1.0, self.hw.overlapped_collective_slowdown_ratio)
        overlap_us = self.free["compute"] - start_us
        if overlap_us <= 0:
            return start_us + alone_us
        if alone_us * slowdown <= overlap_us:
            return start_us + alone_us * slowdown
        return self.free["compute"] + alone_us - overlap_us / slowdown

    def finish(self) -> float:
        """Run the remaining all-reduces and return the end of the step."""
        self.reduce_until(len(self.plan.costs_us) - 1)
        cores_end_us = self.free["compute"]
        links_end_us = max(cores_end_us, self.free["hccl"])
        ai_cpu_end_us = max(links_end_us, self.free["ai_cpu"])
        end_us = max(ai_cpu_end_us, self.hw.graph_launch_us if self.launches else 0.0)
        self.idle_us["communication"] += links_end_us - cores_end_us
        self.idle_us["ai_cpu"] += ai_cpu_end_us - links_end_us
        self.idle_us["host"] += end_us - ai_cpu_end_us
        return end_us


def find_critical_path_us(
    graph: TaskGraph, times: Sequence[TaskTime], plan: StreamAssignment
) -> float:
    """Return the time of the longest chain of tasks and all-reduces that depend on each other."""
    ends = [0.0] * len(graph.tasks)

    @cache
    def find_bucket_end(number: int) -> float:
        return max(ends[index] for index in plan.sources[number]) + plan.costs_us[number]

    for index in plan.order:
        start_us = max((ends[producer] for producer in plan.producers[index]), default=0.0)
        if plan.needs[index] >= 0:
            start_us = max(start_us, find_bucket_end(plan.needs[index]))
        ends[index] = start_us + times[index].us * graph.tasks[index].repeat
    return max((*ends, *map(find_bucket_end, range(len(plan.costs_us)))), default=0.0)
