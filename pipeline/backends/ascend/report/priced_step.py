"""One steady step under one launch mode: its time, its interval, and its parts."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from pipeline.backends.ascend.chip.hardware import Hardware, MeasuredSteps
from pipeline.backends.ascend.chip.options import ExecutionConfig, OptionError
from pipeline.backends.ascend.chip.tasks import Task, TaskBound, TaskGraph, TaskTime
from pipeline.backends.ascend.cost.efficiency import (
    NORMAL_90,
    Calibration,
    Population,
    load_populations,
)
from pipeline.backends.ascend.report.explanation import (
    LayerExplanation,
    describe_range,
    describe_track_record,
    explain_task,
    list_interval_sources,
)
from pipeline.backends.ascend.simulate.timeline import IterationTrace, Kind, Timeline
from pipeline.backends.rates import Communication
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.models.modules.name_stack import find_layer

IMPORTED = "ImportedNetwork"
"""Scope of imported networks, the name of their flax class."""


@dataclass(frozen=True)
class TaskCost:
    """A task of the step, and the time of one execution."""

    task: Task
    time: TaskTime

    @property
    def us(self) -> float:
        """Microseconds of all its repetitions."""
        return self.time.us * self.task.repeat

    @property
    def roofline_us(self) -> float:
        """Microseconds of all its repetitions at peak rates."""
        return self.time.roofline_us * self.task.repeat


@dataclass(frozen=True)
class InsertedTime:
    """Time in us of the inserted tasks of one op type, their number, and their share of a step."""

    type: str
    us: float
    share: float
    tasks: int


@dataclass(frozen=True)
class LayerCost:
    """Time in us of all tasks of one module in both passes, and its share of all layers."""

    layer: str
    us: float
    share: float
    tasks: int


@dataclass(frozen=True, eq=False, repr=False)
class PricedStep:
    """The modelled time of one steady step under one `ExecutionConfig`.

    `batch_size` is the number of samples of one device. `batch_pixels` is height x width of an
    image, None without images. `times` has one entry for each task of `graph`.
    `sources` are the sources of the hardware's figures, by name. `measured_steps` are the steps of
    a user that the figures were fitted to, if any.
    """

    chip: str
    config: ExecutionConfig
    batch_size: int
    batch_pixels: int | None
    graph: TaskGraph
    times: tuple[TaskTime, ...]
    timeline: Timeline
    exchange_bytes: tuple[int, ...]
    calibration: Calibration
    hardware: Hardware
    sources: Mapping[str, str]
    measured_steps: MeasuredSteps | None

    def __repr__(self) -> str:
        low, high = self.interval_ms
        return (
            f"<{type(self).__name__} {self.chip}, {self.config.mode}: modelled "
            f"{self.step_ms:.3g} ms a step ({low:.3g} to {high:.3g})>"
        )

    @property
    def step_ms(self) -> float:
        """Milliseconds of one steady step."""
        return self.timeline.step_us / 1e3

    @property
    def population(self) -> Population:
        """The steps that `interval_ms` comes from.

        These are the user's if the chip was fitted to them, else community code, which
        nobody tuned.
        """
        steps = self.measured_steps
        if steps is not None:
            return Population(1.0, 1.0, 1.0, 0.0, steps.log_sd, 0.0, steps.rows, steps.networks)
        return load_populations().by_name["community"]

    @cached_property
    def interval_ms(self) -> tuple[float, float]:
        """The 80 % interval of the step in ms, as networks and code from outside run.

        `step_ms` may be below it, as most such code takes longer than its modelled work.
        """
        return self.population.interval_ms(
            self.step_ms,
            eager=self.config.mode == "op_by_op",
            chip_log_sd=self.hardware.other_chip_spread_ratio,
        )

    @cached_property
    def table_interval_ms(self) -> tuple[float, float]:
        """The 80 % interval of `step_ms` for networks like those that the model was made with.

        It is log-normal around `step_ms`. The errors of classes of kernels, of a chip that the fit
        didn't see and of whole published steps (`log_sd`) are independent. `interval_scale` makes
        the interval cover 80 % of the steps of published.csv, each by a fit without its family.
        """
        calibration = self.calibration
        spread = math.hypot(self.class_spread, self.hardware.other_chip_spread_ratio)
        log_sd = math.hypot(spread, calibration.log_sd)
        factor = math.exp(NORMAL_90 * log_sd * calibration.interval_scale)
        step_us = self.timeline.step_us
        return step_us / factor / 1e3, step_us * factor / 1e3

    @cached_property
    def class_spread(self) -> float:
        """Standard deviation of the log of the step's time, from the spreads of classes."""
        class_us: dict[str, float] = defaultdict(float)
        for cost in self.tasks:
            if cost.task.engine in ("cube", "vector"):
                class_us[cost.task.cost_class] += cost.us
        classes = self.calibration.efficiency.classes
        squares = sum((us * classes[name].log_sd) ** 2 for name, us in class_us.items())
        return math.sqrt(squares) / self.timeline.step_us if self.timeline.step_us else 0.0

    @property
    def device_ms(self) -> float:
        """Milliseconds of the step's work on the device without waits for the host."""
        return self.timeline.device_us / 1e3

    @property
    def samples_per_s(self) -> float:
        """Samples per second of all devices together."""
        return self.batch_size * self.config.devices / self.timeline.step_us * 1e6

    @cached_property
    def communication(self) -> Communication | None:
        """All-reduces of the gradients and of curvature; None on one device."""
        on_links = (span for span in self.timeline.spans if span.stream == "hccl")
        spans = [span for span in on_links if span.task is None]
        if not spans:
            return None
        return Communication(
            devices=self.config.devices,
            count=len(spans),
            nbytes=sum(nbytes for _, nbytes, _ in self.graph.gradients) + sum(self.exchange_bytes),
            all_reduce_ms=sum(span.duration_us for span in spans) / 1e3,
            exposed_ms=self.timeline.exposed_us["communication"] / 1e3,
            step_ms=self.step_ms,
        )

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """Device time in ms by phase. Communication counts only if no work overlaps it."""
        phase_ms: dict[str, float] = defaultdict(float)
        for cost in self.tasks:
            if cost.task.engine in ("cube", "vector"):
                phase_ms[cost.task.phase] += cost.us / 1e3
        phase_ms["communication"] = self.timeline.exposed_us["communication"] / 1e3
        return dict(phase_ms)

    @property
    def iteration(self) -> IterationTrace:
        """MindInsight's step trace: interval, forward and backward, tail."""
        return self.timeline.iteration

    @cached_property
    def tasks(self) -> tuple[TaskCost, ...]:
        """Every task in the order of execution."""
        return tuple(map(TaskCost, self.graph.tasks, self.times))

    @cached_property
    def inserted(self) -> tuple[InsertedTime, ...]:
        """Conversions and MemSets that the compiler inserted, by op type, slowest first."""
        type_us: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for cost in self.tasks:
            if cost.task.is_inserted:
                type_us[cost.task.type] += cost.us
                counts[cost.task.type] += cost.task.repeat
        ordered = sorted(type_us.items(), key=lambda item: (-item[1], item[0]))
        step_us = self.timeline.step_us
        return tuple(InsertedTime(name, us, us / step_us, counts[name]) for name, us in ordered)

    @cached_property
    def shares(self) -> Mapping[Kind, float]:
        """Shares of the step by kind of work, which add up to 1. Overlapped time counts 0."""
        exposed = self.timeline.exposed_us
        return {kind: us / self.timeline.step_us for kind, us in exposed.items()}

    @cached_property
    def pipelines(self) -> Mapping[TaskBound, float]:
        """Shares of the time of the core's tasks by the pipeline that limits each, largest first.

        A core's pipelines run at once, so the others are hidden. The model has no time of the
        scalar unit apart from the start of a task, `floor`.
        """
        bound_us: dict[TaskBound, float] = defaultdict(float)
        for cost in self.tasks:
            if cost.task.engine in ("cube", "vector"):
                bound_us[cost.time.bound] += cost.us
        total_us = sum(bound_us.values()) or 1.0
        ordered = sorted(bound_us.items(), key=lambda item: (-item[1], item[0]))
        return {bound: us / total_us for bound, us in ordered}

    @property
    def bound(self) -> str:
        """The resource that limits the step."""
        return self.timeline.bound

    @cached_property
    def coverage(self) -> Mapping[str, Any]:
        """Numbers of equations by outcome, and shares of the time by provenance."""
        total = sum(cost.us for cost in self.tasks) or 1.0
        by_provenance: dict[str, float] = defaultdict(float)
        for cost in self.tasks:
            by_provenance[cost.time.provenance] += cost.us / total
        return {
            "equations": dict(self.graph.primitives),
            "unsupported": dict(self.graph.unsupported),
            "time": dict(by_provenance),
        }

    def explain(self, layer: str) -> LayerExplanation:
        """Explain the time of a layer, by its name in `layers`.

        The explanation has the formula of each task, its figures and constants with their sources,
        and the sources of the interval. Raises OptionError for an unknown layer.
        """
        costs = {cost.layer: cost for cost in self.layers}
        if layer not in costs:
            raise OptionError(f"layer: {explain_unknown_name('layer', str(layer), costs)}")
        return LayerExplanation(
            layer=layer,
            us=costs[layer].us,
            share=costs[layer].share,
            tasks=tuple(
                explain_task(cost, self) for cost in self.tasks if name_layer(cost.task) == layer
            ),
            interval_sources=list_interval_sources(self),
            track_record=describe_track_record(self),
            time_range=describe_range(self),
        )

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Modules by their time, slowest first."""
        layer_us: dict[str, float] = defaultdict(float)
        counts: dict[str, int] = defaultdict(int)
        for cost in self.tasks:
            layer = name_layer(cost.task)
            layer_us[layer] += cost.us
            counts[layer] += 1
        total = sum(layer_us.values()) or 1.0
        ordered = sorted(layer_us.items(), key=lambda item: (-item[1], item[0]))
        return tuple(LayerCost(name, us, us / total, counts[name]) for name, us in ordered)


@dataclass
class Layer:
    """Device time of a module in us by phase, with all iterations of loops.

    `update_us` has all phases but forward and backward.
    """

    name: str
    tasks: int = 0
    forward_us: float = 0.0
    backward_us: float = 0.0
    update_us: float = 0.0

    @property
    def us(self) -> float:
        """Microseconds of all phases."""
        return self.forward_us + self.backward_us + self.update_us


def find_slowest_layers(timeline: Timeline, graph: TaskGraph) -> tuple[Layer, ...]:
    """Return the ten layers with the most device time, slowest first.

    All-reduces belong to no layer.
    """
    layers: dict[str, Layer] = {}
    for span in timeline.spans:
        if span.task is None or span.stream == "host":
            continue
        task = graph.tasks[span.task]
        layer = layers.setdefault(name_layer(task), Layer(name_layer(task)))
        layer.tasks += 1
        if task.phase == "forward":
            layer.forward_us += span.duration_us
        elif task.phase == "backward":
            layer.backward_us += span.duration_us
        else:
            layer.update_us += span.duration_us
    return tuple(sorted(layers.values(), key=lambda layer: (-layer.us, layer.name))[:10])


def name_layer(task: Task) -> str:
    """Return the name of a task's layer.

    Tasks outside all modules are named by phase. In an imported network they are named by op type,
    since plain functions may compute much of such a network.
    """
    layer = find_layer(task.scope)
    if layer == IMPORTED:
        return f"(outside modules): {task.type}"
    return layer or f"({task.phase})"
