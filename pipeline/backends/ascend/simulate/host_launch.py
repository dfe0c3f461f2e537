"""The host's op-by-op launches: when it launches each op, and how far it runs ahead."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import TaskGraph
from pipeline.backends.ascend.simulate.stream_assignment import StreamAssignment
from pipeline.backends.ascend.simulate.timeline import Span


@dataclass(frozen=True, slots=True)
class Issue:
    """Launch times of each task and each all-reduce of a step, and the time `each_us` of a launch.

    `end_us` is the end of the last launch.
    """

    tasks_us: tuple[float, ...]
    buckets_us: tuple[float, ...]
    each_us: float
    end_us: float

    def ahead_by(self, us: float, hw: Hardware) -> Issue:
        """Return the same launches earlier, none before the first launch can reach the device."""
        least_us = hw.graph_launch_us
        return replace(
            self,
            tasks_us=tuple(max(least_us, at - us) for at in self.tasks_us),
            buckets_us=tuple(max(least_us, at - us) for at in self.buckets_us),
        )


def issue_times(
    graph: TaskGraph, plan: StreamAssignment, op_launch_us: float, hw: Hardware
) -> Issue:
    """Return op-by-op launch times: the first takes at least as long as a graph's.

    Each iteration of a scan is launched on its own, and each all-reduce after its last gradient.
    Getting the batch is no launch: the host copies it between steps. Nor is a conversion within an
    op, which comes with it.
    """
    tasks_us = [0.0] * len(graph.tasks)
    buckets_us = [0.0] * len(plan.costs_us)
    now = max(hw.graph_launch_us, op_launch_us) - op_launch_us
    for index in plan.order:
        task = graph.tasks[index]
        if not task.launched:
            tasks_us[index] = now
            continue
        tasks_us[index] = now + op_launch_us
        now += task.repeat * op_launch_us if task.phase != "data" else 0.0
        for bucket in plan.issued_after[index]:
            now += op_launch_us
            buckets_us[bucket] = now
    return Issue(tuple(tasks_us), tuple(buckets_us), op_launch_us, max(now, hw.graph_launch_us))


def launch_spans(
    graph: TaskGraph, plan: StreamAssignment, issue: Issue, begin_us: float, step_us: float
) -> Iterator[Span]:
    """Return the launches within a step; those for the next one are at its end.

    `begin_us` is when those for this step began, before 0 where the host runs ahead.
    """
    at_us = 0.0
    for index in plan.order:
        task = graph.tasks[index]
        launches: list[tuple[str, int | None, float, int]] = [
            (f"Launch {task.type}", index, issue.tasks_us[index], task.repeat)
        ]
        if task.phase == "data" or not task.launched:
            launches = []
        for bucket in plan.issued_after[index]:
            launches.append(("Launch AllReduce", None, issue.buckets_us[bucket], 1))
        for name, number, first_us, count in launches:
            us = first_us + issue.each_us * (count - 1) - at_us
            span = Span(name, "host", begin_us + at_us, us, "host", task.phase, number)
            yield from wrapped(span, step_us)
            at_us += us


def wrapped(span: Span, step_us: float) -> Iterator[Span]:
    """Return the parts of a span between 0 and the step's end, as it repeats with every step."""
    start_us = span.start_us % step_us
    over_us = max(0.0, start_us + span.duration_us - step_us)
    yield replace(span, start_us=start_us, duration_us=span.duration_us - over_us)
    yield replace(span, start_us=0.0, duration_us=over_us)
