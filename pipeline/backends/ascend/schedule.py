"""A step under a launch mode: op by op, the graph at once, or a loop of steps on the device.

`op_by_op` and `graph_sink` return to the host after every step, which reads the loss, calls back
and feeds the next batch (`host_step_us`); a sink does so once for all its steps. Between two steps
there is at least the interval that MindInsight shows in a sink (GetNext, loop control): no figure
says that a host-driven step has a shorter one.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from pipeline.backends.ascend.boundary import Boundary, boundary_of
from pipeline.backends.ascend.feeding import feed_of
from pipeline.backends.ascend.hardware import Hardware
from pipeline.backends.ascend.options import StepOptions
from pipeline.backends.ascend.plan import Plan, make_plan
from pipeline.backends.ascend.shares import Part, bound_of, busy_of, exposed_of, kind_of, parts_of
from pipeline.backends.ascend.streams import Issue, Run, critical_path_us, issue_times, run_step
from pipeline.backends.ascend.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.timeline import (
    STREAMS,
    Bound,
    IterationTrace,
    Kind,
    Span,
    Timeline,
)


def schedule(
    graph: TaskGraph, times: Sequence[TaskTime], hw: Hardware, options: StepOptions
) -> Timeline:
    """One steady step of a graph whose task i takes `times[i]`.

    For the same graph and the same options otherwise, loop_sink <= graph_sink <= op_by_op.

    Raises:
        OptionError: devices, a fusion of gradients or a batch that the hardware can't have.
        ValueError: not one time per task.
    """
    if len(times) != len(graph.tasks):
        raise ValueError(f"{len(times)} times for {len(graph.tasks)} tasks")
    plan = make_plan(graph, options, hw)
    feed = feed_of(options, hw)
    alone = run_step(graph, times, plan, hw, options)
    run, issue = alone, None
    if options.mode == "op_by_op":
        each_us = hw.op_launch_us if options.op_launch_us is None else options.op_launch_us
        issue = issue_times(graph, plan, each_us, hw)
        run = run_step(graph, times, plan, hw, options, issue)
    boundary = boundary_of(feed, run.end_us, hw, options)
    parts = (*boundary.parts(), *parts_of(graph, times, run))
    spans = (*boundary.spans(), *_run_spans(graph, times, plan, run, issue, boundary.end_us))
    host_us = boundary.host_us + (issue.end_us if issue else 0.0)
    return Timeline(
        mode=options.mode,
        devices=options.devices,
        spans=_in_order(spans),
        step_us=boundary.end_us + run.end_us,
        device_us=alone.end_us,
        host_us=host_us,
        critical_path_us=critical_path_us(graph, times, plan),
        iteration=_iteration(graph, run, boundary.end_us),
        exposed_us=exposed_of(parts),
        busy_us=_busy(graph, run, boundary, host_us),
        bound=_bound(parts, boundary, host_led=issue is not None and host_us > alone.end_us),
        launch_us=boundary.host_us * options.steps_per_launch,
        steps_per_launch=options.steps_per_launch,
    )


def _bound(parts: Sequence[Part], boundary: Boundary, *, host_led: bool) -> Bound:
    """Who is waited for sets the pace, however little of the step the wait is."""
    if boundary.wait_us:
        return boundary.starved_by
    return "host launch" if host_led else bound_of(parts)


def _busy(graph: TaskGraph, run: Run, boundary: Boundary, host_us: float) -> dict[Kind, float]:
    busy = busy_of(graph, run)
    busy["host"] += host_us
    busy["data"] += boundary.busy_us
    return busy


def _iteration(graph: TaskGraph, run: Run, begin_us: float) -> IterationTrace:
    """From the first task of the forward pass to the end of the last of the backward pass."""
    passes = [
        index for index, task in enumerate(graph.tasks) if task.phase in ("forward", "backward")
    ]
    first_us = min((run.starts_us[index] for index in passes), default=0.0)
    last_us = max((run.ends_us[index] for index in passes), default=0.0)
    return IterationTrace(begin_us + first_us, last_us - first_us, run.end_us - last_us)


def _run_spans(
    graph: TaskGraph,
    times: Sequence[TaskTime],
    plan: Plan,
    run: Run,
    issue: Issue | None,
    begin_us: float,
) -> Iterator[Span]:
    for index, task in enumerate(graph.tasks):
        yield Span(
            task.type,
            plan.lanes[index],
            begin_us + run.starts_us[index],
            run.ends_us[index] - run.starts_us[index],
            kind_of(task),
            task.phase,
            index,
            run.ai_cpu_lanes.get(index, 0),
            times[index].bound,
        )
    for number, (start, end) in enumerate(run.buckets_us):
        name = f"AllReduce {number + 1}" if len(run.buckets_us) > 1 else "AllReduce"
        kind = "communication"
        yield Span(name, "hccl", begin_us + start, end - start, kind, kind)  # type: ignore[arg-type]
    if issue:
        yield from _launches(graph, plan, issue, begin_us)


def _launches(graph: TaskGraph, plan: Plan, issue: Issue, begin_us: float) -> Iterator[Span]:
    """The host's launches; one ends when the device may start."""
    free_us = 0.0
    for index in plan.order:
        if graph.tasks[index].phase == "data":
            continue
        task, last_us = graph.tasks[index], issue.each_us * (graph.tasks[index].repeat - 1)
        at_us = max(free_us, issue.tasks_us[index] - issue.each_us)
        free_us = issue.tasks_us[index] + last_us
        name, us = f"Launch {task.type}", free_us - at_us
        yield Span(name, "host", begin_us + at_us, us, "host", task.phase, index)


def _in_order(spans: Sequence[Span]) -> tuple[Span, ...]:
    rank = {stream: number for number, (stream, _) in enumerate(STREAMS)}
    shown = (span for span in spans if span.duration_us > 0)
    return tuple(sorted(shown, key=lambda span: (rank[span.stream], span.lane, span.start_us)))
