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
from dataclasses import dataclass, replace

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.simulate.step_interval import Boundary, boundary_of, feed_of
from pipeline.backends.ascend.simulate.stream_assignment import (
    Lane,
    StreamAssignment,
    assign_streams,
)
from pipeline.backends.ascend.simulate.streams import (
    Cause,
    Issue,
    Run,
    critical_path_us,
    issue_times,
    launch_spans,
    run_step,
    wrapped,
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
    launched = _launched(graph, times, plan, hw, options)
    run, boundary, issue = launched.run, launched.boundary, launched.issue
    parts = (*boundary.parts(), *parts_of(graph, times, run))
    host_us = boundary.host_us + (issue.end_us if issue else 0.0)
    return Timeline(
        mode=options.mode,
        devices=options.devices,
        spans=_in_order((*_host_spans(graph, plan, launched), *_run_spans(graph, times, launched))),
        step_us=launched.step_us,
        device_us=launched.device_us,
        host_us=host_us,
        critical_path_us=critical_path_us(graph, times, plan),
        iteration=_iteration(graph, run, boundary.end_us),
        exposed_us=exposed_of(parts),
        busy_us=_busy(graph, run, boundary, host_us),
        bound=_bound(parts, launched),
        launch_us=boundary.host_us * options.steps_per_launch,
        steps_per_launch=options.steps_per_launch,
    )


@dataclass(frozen=True, slots=True)
class _Launched:
    """A step on the timeline: its boundary, its tasks, and the host's lead over the device."""

    boundary: Boundary
    run: Run
    lanes: tuple[Lane, ...]
    device_us: float
    issue: Issue | None = None
    ahead_us: float = 0.0
    host_led: bool = False

    @property
    def step_us(self) -> float:
        """Microseconds from the end of the step before to the end of this one."""
        return self.boundary.end_us + self.run.end_us


def _launched(
    graph: TaskGraph,
    times: Sequence[TaskTime],
    plan: StreamAssignment,
    hw: Hardware,
    options: StepOptions,
) -> _Launched:
    feed = feed_of(options, hw)
    alone = run_step(graph, times, plan, hw, options)
    if options.mode != "op_by_op":
        boundary = boundary_of(feed, alone.end_us, hw, options)
        return _Launched(boundary, alone, plan.lanes, alone.end_us)
    each_us = hw.op_launch_us if options.op_launch_us is None else options.op_launch_us
    issue = issue_times(graph, plan, each_us, hw)
    waiting = run_step(graph, times, plan, hw, options, issue)
    device_us = hw.graph_launch_us + alone.end_us
    ahead_us = max(0.0, waiting.end_us - max(issue.end_us, device_us))
    run = run_step(graph, times, plan, hw, options, issue.ahead_by(ahead_us, hw))
    boundary = boundary_of(feed, run.end_us, hw, options)
    host_led = issue.end_us > device_us
    return _Launched(boundary, run, plan.lanes, alone.end_us, issue, ahead_us, host_led)


def _bound(parts: Sequence[TimeSlice], launched: _Launched) -> Bound:
    """Return the bound; a stage that is waited for sets the pace, however short the wait."""
    if launched.boundary.wait_us:
        return launched.boundary.starved_by
    return "host launch" if launched.host_led else bound_of(parts)


def _busy(graph: TaskGraph, run: Run, boundary: Boundary, host_us: float) -> dict[Kind, float]:
    busy = busy_of(graph, run)
    busy["host"] += host_us
    busy["data"] += boundary.busy_us
    return busy


def _iteration(graph: TaskGraph, run: Run, begin_us: float) -> IterationTrace:
    """Return the iteration: forward and backward pass from their first task to their last."""
    passes = [
        index for index, task in enumerate(graph.tasks) if task.phase in ("forward", "backward")
    ]
    first_us = min((run.starts_us[index] for index in passes), default=0.0)
    last_us = max((run.ends_us[index] for index in passes), default=0.0)
    return IterationTrace(begin_us + first_us, last_us - first_us, run.end_us - last_us)


def _run_spans(graph: TaskGraph, times: Sequence[TaskTime], launched: _Launched) -> Iterator[Span]:
    run, begin_us = launched.run, launched.boundary.end_us
    for index, task in enumerate(graph.tasks):
        yield Span(
            task.type,
            launched.lanes[index],
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
        at_us, us = begin_us + start, end - start
        yield Span(name, "hccl", at_us, us, "communication", "communication")


def _host_spans(graph: TaskGraph, plan: StreamAssignment, launched: _Launched) -> Iterator[Span]:
    """Return the spans of the boundary; a host that runs ahead does its part earlier."""
    begin_us = launched.boundary.end_us - launched.ahead_us
    for span in launched.boundary.spans():
        if span.stream == "host" and launched.ahead_us:
            early_us = begin_us - launched.boundary.interval_us - span.duration_us
            yield from wrapped(replace(span, start_us=early_us), launched.step_us)
        else:
            yield span
    if launched.issue:
        yield from launch_spans(graph, plan, launched.issue, begin_us, launched.step_us)


def _in_order(spans: Sequence[Span]) -> tuple[Span, ...]:
    rank = {stream: number for number, (stream, _) in enumerate(STREAMS)}
    shown = (span for span in spans if span.duration_us > 0)
    return tuple(sorted(shown, key=lambda span: (rank[span.stream], span.lane, span.start_us)))


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
