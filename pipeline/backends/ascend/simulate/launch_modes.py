"""A step under a launch mode: op by op, the graph at once, or a loop of steps on the device.

`op_by_op` and `graph_sink` return to the host after every step, which reads the loss, runs
callbacks and feeds the next batch (`host_step_us`); a sink does so once for all its steps. Between
two steps there is at least the interval that MindInsight shows in a sink (GetNext, loop control):
no figure says that a host-driven step has a shorter one.

Op by op, the host launches the next step's ops while the device still runs this step's. A steady
step takes as long as the slower of the two: the host's launches, or a graph's step on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.simulate.step_interval import boundary_of, feed_of
from pipeline.backends.ascend.simulate.streams import (
    Cause,
    Lane,
    Run,
    assign_streams,
    critical_path_us,
    issue_times,
    launch_spans,
    run_step,
    wrap_span,
)
from pipeline.backends.ascend.simulate.timeline import (
    KINDS,
    STREAMS,
    Bound,
    IterationTrace,
    Kind,
    Span,
    Timeline,
    TimeSlice,
    kind_of,
)

LIMITS: dict[str, Bound] = {"cube": "cube", "vector": "vector", "memory": "memory", "l2": "memory"}
HOLES: dict[Cause, tuple[Kind, Bound]] = {
    "host": ("host", "host launch"),
    "ai_cpu": ("ai_cpu", "ai_cpu"),
    "communication": ("communication", "communication"),
}


def schedule(
    graph: TaskGraph, times: Sequence[TaskTime], hw: Hardware, options: StepOptions
) -> Timeline:
    """Return one steady step of a graph whose task i takes `times[i]`.

    For the same graph and the same options otherwise, loop_sink <= graph_sink <= op_by_op.

    Raises:
        OptionError: devices, a fusion of gradients or a batch that the hardware can't have.
        ValueError: not one time per task.
    """
    if len(times) != len(graph.tasks):
        raise ValueError(f"{len(times)} times for {len(graph.tasks)} tasks")
    plan = assign_streams(graph, options, hw)
    feed = feed_of(options, hw)
    alone = run_step(graph, times, plan, hw, options)
    run = alone
    issue = None
    ahead_us = 0.0
    host_led = False
    if options.mode == "op_by_op":
        op_us = hw.op_launch_us if options.op_launch_us is None else options.op_launch_us
        issue = issue_times(graph, plan, op_us, hw)
        waiting = run_step(graph, times, plan, hw, options, issue)
        device_us = hw.graph_launch_us + alone.end_us
        ahead_us = max(0.0, waiting.end_us - max(issue.end_us, device_us))
        run = run_step(graph, times, plan, hw, options, issue.ahead_by(ahead_us, hw))
        host_led = issue.end_us > device_us
    boundary = boundary_of(feed, run.end_us, hw, options)
    step_us = boundary.end_us + run.end_us
    host_us = boundary.host_us + (issue.end_us if issue else 0.0)

    exposed_us: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    limits: dict[Bound, float] = {}
    for part in (*boundary.parts(), *_compute_slices(graph, times, run)):
        exposed_us[part.kind] += part.us
        limits[part.bound] = limits.get(part.bound, 0.0) + part.us
    bound = max(limits, key=limits.__getitem__)
    if boundary.wait_us:
        # A stage that is waited for sets the pace, however short the wait.
        bound = boundary.starved_by
    elif host_led:
        bound = "host launch"

    busy_us: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    for index, task in enumerate(graph.tasks):
        busy_us[kind_of(task)] += run.compute_us[index] or run.ends_us[index] - run.starts_us[index]
    busy_us["communication"] += sum(end - start for start, end in run.buckets_us)
    busy_us["host"] += host_us
    busy_us["data"] += boundary.busy_us

    spans: list[Span] = []
    begin_us = boundary.end_us - ahead_us
    for span in boundary.spans():
        if span.stream == "host" and ahead_us:
            # A host that runs ahead does its part of the boundary earlier.
            early_us = begin_us - boundary.interval_us - span.duration_us
            spans += wrap_span(replace(span, start_us=early_us), step_us)
        else:
            spans.append(span)
    if issue:
        spans += launch_spans(graph, plan, issue, begin_us, step_us)
    spans += _run_spans(graph, times, plan.lanes, run, boundary.end_us)
    rank = {stream: number for number, (stream, _) in enumerate(STREAMS)}
    spans.sort(key=lambda span: (rank[span.stream], span.lane, span.start_us))
    return Timeline(
        mode=options.mode,
        devices=options.devices,
        spans=tuple(span for span in spans if span.duration_us > 0),
        step_us=step_us,
        device_us=alone.end_us,
        host_us=host_us,
        critical_path_us=critical_path_us(graph, times, plan),
        iteration=_trace_iteration(graph, run, boundary.end_us),
        exposed_us=exposed_us,
        busy_us=busy_us,
        bound=bound,
        launch_us=boundary.host_us * options.steps_per_launch,
        steps_per_launch=options.steps_per_launch,
    )


def _compute_slices(graph: TaskGraph, times: Sequence[TaskTime], run: Run) -> Iterator[TimeSlice]:
    """Return the slices of a run: compute tasks, and the causes of the AI Cores' idle time."""
    for task, time, us in zip(graph.tasks, times, run.compute_us, strict=True):
        if us:
            kind = kind_of(task)
            # A task at its floor is short of nothing but size; its engine stands for it.
            engine: Bound = "cube" if kind == "cube" else "vector"
            bound = "format" if kind == "format" else LIMITS.get(time.bound, engine)
            yield TimeSlice(kind, bound, us)
    for cause, us in run.holes_us.items():
        yield TimeSlice(*HOLES[cause], us)


def _trace_iteration(graph: TaskGraph, run: Run, begin_us: float) -> IterationTrace:
    """Return the iteration: forward and backward pass from their first task to their last."""
    passes = [
        index for index, task in enumerate(graph.tasks) if task.phase in ("forward", "backward")
    ]
    first_us = min((run.starts_us[index] for index in passes), default=0.0)
    last_us = max((run.ends_us[index] for index in passes), default=0.0)
    return IterationTrace(begin_us + first_us, last_us - first_us, run.end_us - last_us)


def _run_spans(
    graph: TaskGraph,
    times: Sequence[TaskTime],
    lanes: Sequence[Lane],
    run: Run,
    begin_us: float,
) -> Iterator[Span]:
    for index, task in enumerate(graph.tasks):
        yield Span(
            task.type,
            lanes[index],
            begin_us + run.starts_us[index],
            run.ends_us[index] - run.starts_us[index],
            kind_of(task),
            task.phase,
            index,
            run.ai_cpu_lanes.get(index, 0),
            times[index].bound,
        )
    for number, (start, end) in enumerate(run.buckets_us, 1):
        name = f"AllReduce {number}" if len(run.buckets_us) > 1 else "AllReduce"
        yield Span(name, "hccl", begin_us + start, end - start, "communication", "communication")
