"""A step under a launch mode: op by op, the graph at once, or a loop of steps on the device.

`op_by_op` and `graph_sink` return to the host after every step. The host reads the loss, runs
callbacks and loads the next batch (`host_step_us`). A loop sink returns once for all its steps.
Between two steps there is at least the interval that MindInsight shows in a sink (GetNext, loop
control). No published figure is shorter.

Op by op, the host launches the ops of the next step while the device runs this step. A steady step
takes the longer of two times: the host's launches, and a graph's step on the device.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.options import OptionError, StepOptions
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.simulate.streams import (
    Cause,
    LaunchTimes,
    Run,
    StreamAssignment,
    assign_streams,
    compute_launch_times,
    find_critical_path_us,
    form_launch_spans,
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
    classify_time,
)

TimeSlice = tuple[Kind, Bound, float]
"""Kind, bound and microseconds of a part of a step's time that overlaps no other slice."""

TASK_BOUNDS: dict[str, Bound] = {
    "cube": "cube", "vector": "vector", "memory": "memory", "l2": "memory",
}  # fmt: skip
"""Bounds of a slice of time by `TaskTime.bound`."""
IDLE_KINDS: dict[Cause, tuple[Kind, Bound]] = {
    "host": ("host", "host launch"),
    "ai_cpu": ("ai_cpu", "ai_cpu"),
    "communication": ("communication", "communication"),
}
"""Kind and bound of the AI Cores' idle time, by cause."""
REFERENCE_PIXELS = 224 * 224
"""Pixels of an image in the chip's figures of the host."""


def compute_images_per_s(workers: int, pixels: int, devices: int, hw: Hardware) -> float:
    """Return the images that the host prepares for one device in a second.

    `workers` processes serve one device. All devices of a server share its host. Work is
    proportional to the pixels of an image (height x width). The rate of a worker follows from
    MindSpore's r1.5 profiling guide: ResNet-50 with one worker took 90.7 ms for 32 images.

    Raises OptionError for workers, pixels or devices below 1.
    """
    for name, value in (("host_workers", workers), ("pixels", pixels), ("devices", devices)):
        if value < 1:
            raise OptionError(f"{name} = {value}: must be at least 1")
    in_server = min(devices, int(hw.devices_per_server_count))
    images_per_s = min(workers * hw.host_worker_images_per_s, hw.host_images_per_s / in_server)
    return images_per_s * REFERENCE_PIXELS / pixels


def check_queue(options: StepOptions, hw: Hardware) -> None:
    """Raise OptionError for a batch that doesn't fit the queue on the device, if it is used."""
    limit_bytes = int(hw.data_queue_gib * 2**30)
    if options.uses_queue and options.batch_bytes > limit_bytes:
        fits = options.batch_size * limit_bytes // options.batch_bytes
        at_most = f"use at most {fits} a device, or " if fits else ""
        raise OptionError(
            f"batch_size = {options.batch_size}: makes a batch of "
            f"{options.batch_bytes / 2**30:.3g} GiB, more than the {hw.data_queue_gib:g} GiB of "
            f"the queue on the device; {at_most}turn data sinking off"
        )


@dataclass(frozen=True, slots=True)
class Boundary:
    """Time between two steps on the device.

    `host_us` is the step's share of the host's time for a launch, `wait_us` the device's wait for a
    batch, `copy_us` the copy of a batch without a queue, `interval_us` the sum of GetNext, loop
    control and the copy. In parallel with the step the host prepares a batch in `prepare_us`, and
    PCIe copies it in `pcie_us`.
    """

    host_us: float
    wait_us: float
    copy_us: float
    interval_us: float
    prepare_us: float
    pcie_us: float

    @property
    def end_us(self) -> float:
        """Microseconds from the end of a step to the start of the next step."""
        return self.host_us + self.wait_us + self.interval_us

    @property
    def starved_by(self) -> Bound:
        """The slower stage of the loader, which causes waits for data."""
        return "host data" if self.prepare_us >= self.pcie_us or self.copy_us else "pcie"

    def list_slices(self) -> Iterator[TimeSlice]:
        """Yield the boundary's time in slices."""
        yield "host", "host launch", self.host_us
        yield "data", self.starved_by, self.wait_us
        yield "data", "pcie", self.copy_us
        yield "data", "interval", self.interval_us - self.copy_us

    def list_spans(self) -> Iterator[Span]:
        """Yield the boundary's spans."""
        begin_us = self.host_us + self.wait_us
        yield Span("Callbacks and launch", "host", 0.0, self.host_us, "host")
        yield Span("Prepare a batch", "feed", 0.0, self.prepare_us, "data")
        copy_at_us = begin_us if self.copy_us else 0.0
        yield Span("Copy a batch", "pcie", copy_at_us, self.pcie_us, "data")
        yield Span("Wait for data", "get_next", self.host_us, self.wait_us, "data")
        yield Span("Step interval", "get_next", begin_us, self.interval_us, "data")


def compute_boundary(run_us: float, hw: Hardware, options: StepOptions) -> Boundary:
    """Return the boundary before a step that runs for `run_us`.

    A queue fills while the device computes and while the host runs callbacks. So the device waits
    for data only if preparing or copying a batch takes longer than a step. Without a queue or a
    prefetcher the copy is a part of the step, and workers prepare the next batch during the step.
    """
    rate = options.host_images_per_s
    prepare_us = 0.0 if rate is None else options.batch_size / rate * 1e6
    pcie_us = options.batch_bytes / (hw.pcie_gb_per_s * 1e3)
    host_us = hw.host_step_us
    if options.mode != "op_by_op":
        host_us = (host_us + hw.graph_launch_us) / options.steps_per_launch
    is_distributed = options.devices > 1
    interval_us = hw.sink_interval_distributed_us if is_distributed else hw.sink_interval_us
    copy_us = 0.0 if options.copies_ahead else pcie_us
    interval_us = max(interval_us, copy_us)
    due_us = max(prepare_us, pcie_us) if options.copies_ahead else prepare_us
    wait_us = max(0.0, due_us - (host_us + interval_us + run_us))
    return Boundary(host_us, wait_us, copy_us, interval_us, prepare_us, pcie_us)


@dataclass(frozen=True, slots=True)
class SteadyStep:
    """One steady step of a graph whose task i takes `times[i]`, and the boundary before it.

    `device_us` is the time of the graph launched at once, `launches` the host's launches op by op,
    which are `ahead_us` ahead of the device's first step.
    """

    graph: TaskGraph
    times: Sequence[TaskTime]
    plan: StreamAssignment
    run: Run
    boundary: Boundary
    device_us: float
    launches: LaunchTimes | None
    ahead_us: float
    is_host_slower: bool

    @property
    def step_us(self) -> float:
        """Microseconds from the end of one step to the end of the next."""
        return self.boundary.end_us + self.run.end_us


def schedule(
    graph: TaskGraph, times: Sequence[TaskTime], hw: Hardware, options: StepOptions
) -> Timeline:
    """Return one steady step of a graph whose task i takes `times[i]`.

    With all other options equal, loop_sink <= graph_sink <= op_by_op.

    Raises OptionError for a number of devices, a fusion of gradients or a batch that the hardware
    doesn't support.
    """
    step = _simulate_step(graph, times, hw, options)
    exposed_us, bound = _attribute_time(step)
    return Timeline(
        mode=options.mode,
        devices=options.devices,
        spans=tuple(span for span in _list_spans(step) if span.duration_us > 0),
        step_us=step.step_us,
        device_us=step.device_us,
        host_us=step.boundary.host_us + (step.launches.end_us if step.launches else 0.0),
        critical_path_us=find_critical_path_us(graph, times, step.plan),
        iteration=_trace_iteration(step),
        exposed_us=exposed_us,
        bound=bound,
        launch_us=step.boundary.host_us * options.steps_per_launch,
        steps_per_launch=options.steps_per_launch,
    )


def _simulate_step(
    graph: TaskGraph, times: Sequence[TaskTime], hw: Hardware, options: StepOptions
) -> SteadyStep:
    """Run the graph under the launch mode. Raises OptionError as `schedule` does."""
    plan = assign_streams(graph, options, hw)
    check_queue(options, hw)
    graph_run = Run(graph, times, plan, hw)
    run = graph_run
    launches = None
    ahead_us = 0.0
    is_host_slower = False
    if options.mode == "op_by_op":
        op_us = hw.op_launch_us if options.op_launch_us is None else options.op_launch_us
        launches = compute_launch_times(graph, plan, op_us, hw)
        first_run = Run(graph, times, plan, hw, launches)
        device_us = hw.graph_launch_us + graph_run.end_us
        # The host runs ahead by what a first step takes beyond the longer of host and device times.
        ahead_us = max(0.0, first_run.end_us - max(launches.end_us, device_us))
        run = Run(graph, times, plan, hw, launches.shift_earlier(ahead_us, hw))
        is_host_slower = launches.end_us > device_us
    boundary = compute_boundary(run.end_us, hw, options)
    return SteadyStep(
        graph, times, plan, run, boundary, graph_run.end_us, launches, ahead_us, is_host_slower
    )


def _attribute_time(step: SteadyStep) -> tuple[dict[Kind, float], Bound]:
    """Return the step's time by kind, and what bounds it."""
    exposed_us: dict[Kind, float] = dict.fromkeys(KINDS, 0.0)
    limits: dict[Bound, float] = {}
    for kind, bound, us in (*step.boundary.list_slices(), *_compute_slices(step)):
        exposed_us[kind] += us
        limits[bound] = limits.get(bound, 0.0) + us
    if step.boundary.wait_us:
        # If the device waits for a stage, even briefly, the stage sets the pace.
        return exposed_us, step.boundary.starved_by
    if step.is_host_slower:
        return exposed_us, "host launch"
    return exposed_us, max(limits, key=limits.__getitem__)


def _list_spans(step: SteadyStep) -> list[Span]:
    """Return the step's spans, sorted by stream and start."""
    spans: list[Span] = []
    begin_us = step.boundary.end_us - step.ahead_us
    for span in step.boundary.list_spans():
        if span.stream == "host" and step.ahead_us:
            # A host that is ahead of the device runs callbacks and launches earlier.
            early_us = begin_us - step.boundary.interval_us - span.duration_us
            spans += wrap_span(replace(span, start_us=early_us), step.step_us)
        else:
            spans.append(span)
    if step.launches:
        spans += form_launch_spans(step.graph, step.plan, step.launches, begin_us, step.step_us)
    spans += _form_run_spans(step)
    streams = list(STREAMS)
    return sorted(spans, key=lambda span: (streams.index(span.stream), span.start_us))


def _compute_slices(step: SteadyStep) -> Iterator[TimeSlice]:
    """Yield the slices of a run: compute tasks, and the causes of the AI Cores' idle time."""
    for task, time, us in zip(step.graph.tasks, step.times, step.run.compute_us, strict=True):
        if us:
            kind = classify_time(task)
            # A task with the time of an empty kernel counts as bound by its engine.
            engine: Bound = "cube" if kind == "cube" else "vector"
            bound = "format" if kind == "format" else TASK_BOUNDS.get(time.bound, engine)
            yield kind, bound, us
    for cause, us in step.run.idle_us.items():
        kind, bound = IDLE_KINDS[cause]
        yield kind, bound, us


def _trace_iteration(step: SteadyStep) -> IterationTrace:
    """Return the iteration's parts, split at the first and last task of both passes."""
    run = step.run
    passes = [
        index
        for index, task in enumerate(step.graph.tasks)
        if task.phase in ("forward", "backward")
    ]
    first_us = min((run.starts_us[index] for index in passes), default=0.0)
    last_us = max((run.ends_us[index] for index in passes), default=0.0)
    interval_us = step.boundary.end_us + first_us
    return IterationTrace(interval_us, last_us - first_us, run.end_us - last_us)


def _form_run_spans(step: SteadyStep) -> Iterator[Span]:
    """Yield the spans of tasks and all-reduces."""
    run = step.run
    begin_us = step.boundary.end_us
    for index, task in enumerate(step.graph.tasks):
        yield Span(
            task.type,
            step.plan.streams[index],
            begin_us + run.starts_us[index],
            run.ends_us[index] - run.starts_us[index],
            classify_time(task),
            task.phase,
            index,
            step.times[index].bound,
        )
    for number, (start, end) in enumerate(run.buckets_us, 1):
        name = f"AllReduce {number}" if len(run.buckets_us) > 1 else "AllReduce"
        yield Span(name, "hccl", begin_us + start, end - start, "communication", "communication")
