"""What a price says: the step's time with its interval, what it is spent on, what would help."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.backends.ascend.chip.options import MODES, Mode
from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.memory.memory_plan import MemoryPlan
from pipeline.backends.ascend.report.html_timeline import write_picture
from pipeline.backends.ascend.report.perfetto_trace import write_trace
from pipeline.backends.ascend.report.time_by_layer import layer_named
from pipeline.backends.ascend.report.uncertainty import interval_of
from pipeline.backends.ascend.simulate.timeline import IterationTrace, Kind, Timeline
from pipeline.backends.ascend.tune.autotune import TuneResult

if TYPE_CHECKING:
    from pipeline.backends.ascend.pricing.pricing import ExecutionConfig, Pricing


@dataclass(frozen=True)
class TaskCost:
    """One task of the step and its time, all its repetitions together."""

    type: str
    scope: str
    engine: str
    phase: str
    cost_class: str
    us: float
    roofline_us: float
    bound: str
    provenance: str
    repeat: int


@dataclass(frozen=True)
class LayerCost:
    """All tasks of one module of the network, forward and backward."""

    layer: str
    us: float
    share: float
    tasks: int


class Report:
    """The price of one step. Every figure in it is modelled; times are of one steady step."""

    def __init__(
        self,
        pricing: Pricing,
        question: ExecutionConfig,
        graph: TaskGraph,
        times: tuple[TaskTime, ...],
        timeline: Timeline,
    ) -> None:
        self.pricing, self.question = pricing, question
        self.graph, self.times, self.timeline = graph, times, timeline

    def __str__(self) -> str:
        from pipeline.backends.ascend.report.text import printout

        return printout(self)

    def __repr__(self) -> str:
        low, high = self.interval_ms
        return (
            f"<Report {self.pricing.chip.name}, {self.question.mode}: modelled "
            f"{self.step_ms:.3g} ms a step ({low:.3g} to {high:.3g})>"
        )

    @property
    def step_ms(self) -> float:
        """One steady step."""
        return self.timeline.step_us / 1e3

    @cached_property
    def interval_ms(self) -> tuple[float, float]:
        """The 80 % interval of `step_ms`: the true time lies below, or above, one time in ten."""
        low, high = interval_of(self.graph, self.times, self.timeline, self.pricing.calibration)
        return low / 1e3, high / 1e3

    @property
    def device_ms(self) -> float:
        """The step's work on the device, if nothing had to wait for the host."""
        return self.timeline.device_us / 1e3

    @property
    def samples_per_s(self) -> float:
        """Of all devices together."""
        batch = self.pricing.traced.batch_size * self.question.devices
        return batch / self.timeline.step_us * 1e6

    @cached_property
    def phases(self) -> Mapping[str, float]:
        """Device time in ms by phase; of communication what is not hidden."""
        spent: dict[str, float] = defaultdict(float)
        for task, time in zip(self.graph.tasks, self.times, strict=True):
            if task.engine in ("cube", "vector"):
                spent[task.phase] += time.us * task.repeat / 1e3
        spent["communication"] = self.timeline.exposed_us["communication"] / 1e3
        return dict(spent)

    @property
    def iteration(self) -> IterationTrace:
        """Interval, forward and backward, tail: MindInsight's step trace."""
        return self.timeline.iteration

    @cached_property
    def memory(self) -> MemoryPlan:
        """Where everything lies in device memory."""
        return self.pricing.memory(self.question)

    @property
    def tuning(self) -> TuneResult | None:
        """What AutoTune found, operator by operator; None where it was not asked for."""
        return self.pricing.tuning(self.question)

    @cached_property
    def tasks(self) -> tuple[TaskCost, ...]:
        """Every task in the order of execution."""
        return tuple(
            TaskCost(
                task.type,
                task.scope,
                task.engine,
                task.phase,
                task.cost_class,
                time.us * task.repeat,
                time.roofline_us * task.repeat,
                time.bound,
                time.provenance,
                task.repeat,
            )
            for task, time in zip(self.graph.tasks, self.times, strict=True)
        )

    @cached_property
    def shares(self) -> Mapping[Kind, float]:
        """What the step is spent on, as parts of 1; what is hidden behind something else has none.

        Cube, vector, format conversion, communication, AI CPU, data and host.
        """
        exposed = self.timeline.exposed_us
        return {kind: us / self.timeline.step_us for kind, us in exposed.items()}

    @property
    def bound(self) -> str:
        """What limits the step."""
        return self.timeline.bound

    @cached_property
    def coverage(self) -> Mapping[str, Any]:
        """What became of every equation, and how sure the times are, weighted by time."""
        total = sum(task.us for task in self.tasks) or 1.0
        sure: dict[str, float] = defaultdict(float)
        for task in self.tasks:
            sure[task.provenance] += task.us / total
        return {
            "equations": dict(self.graph.primitives),
            "unsupported": dict(self.graph.unsupported),
            "time": dict(sure),
        }

    @cached_property
    def modes(self) -> Mapping[Mode, Report]:
        """The same step under all three launch modes."""
        return {
            mode: self if mode == self.question.mode else self._asked(mode=mode) for mode in MODES
        }

    def _asked(self, **changes: Any) -> Report:
        return self.pricing.report(replace(self.question, **changes))

    @cached_property
    def layers(self) -> tuple[LayerCost, ...]:
        """Modules by their time, dearest first."""
        spent: dict[str, float] = defaultdict(float)
        counted: dict[str, int] = defaultdict(int)
        for task in self.tasks:
            layer = layer_named(task.scope, task.phase)
            spent[layer] += task.us
            counted[layer] += 1
        total = sum(spent.values()) or 1.0
        ordered = sorted(spent.items(), key=lambda item: (-item[1], item[0]))
        return tuple(LayerCost(name, us, us / total, counted[name]) for name, us in ordered)

    def to_dict(self) -> dict[str, Any]:
        """Everything but the tasks, ready for JSON; modelled times say so."""
        low, high = self.interval_ms
        return {
            "hardware": self.pricing.chip.name,
            "question": _plain(self.question),
            "modelled_step_ms": self.step_ms,
            "modelled_interval_ms": [low, high],
            "modelled_device_ms": self.device_ms,
            "modelled_samples_per_s": self.samples_per_s,
            "modelled_phases_ms": dict(self.phases),
            "modelled_iteration_ms": {
                "interval": self.iteration.interval_us / 1e3,
                "fp_bp": self.iteration.fp_bp_us / 1e3,
                "tail": self.iteration.tail_us / 1e3,
            },
            "modelled_exposed_ms": {k: us / 1e3 for k, us in self.timeline.exposed_us.items()},
            "modelled_shares": dict(self.shares),
            "modelled_modes_ms": {mode: report.step_ms for mode, report in self.modes.items()},
            "modelled_modes_interval_ms": {
                mode: list(report.interval_ms) for mode, report in self.modes.items()
            },
            "bound": self.bound,
            "memory": self._memory_dict(),
            "auto_tune": self._tuning_dict(),
            "layers": [
                {"layer": layer.layer, "modelled_ms": layer.us / 1e3, "share": layer.share}
                for layer in self.layers[:10]
            ],
            "coverage": dict(self.coverage),
            "tasks": len(self.graph.tasks),
        }

    def _memory_dict(self) -> dict[str, Any]:
        plan = self.memory
        return {
            "verdict": plan.verdict,
            "used_bytes": plan.used_bytes,
            "pools": {
                limit.what: {"used_bytes": limit.used_bytes, "limit_bytes": limit.limit_bytes}
                for limit in plan.limits
            },
            "components": dict(plan.components),
        }

    def _tuning_dict(self) -> dict[str, Any] | None:
        if self.tuning is None:
            return None
        before_us, after_us = self.tuned_us
        return {
            "operators": len(self.tuning.tasks),
            "modelled_before_ms": before_us / 1e3,
            "modelled_after_ms": after_us / 1e3,
        }

    @property
    def tuned_us(self) -> tuple[float, float]:
        """All products of the step before and after AutoTune; nothing of either without it."""
        tuned = self.tuning.tasks if self.tuning else ()
        turns = [self.graph.tasks[task.index].repeat for task in tuned]
        before = sum(task.before_us * count for task, count in zip(tuned, turns, strict=True))
        after = sum(task.after_us * count for task, count in zip(tuned, turns, strict=True))
        return before, after

    def save(self, path: str | Path) -> None:
        """`to_dict` as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def save_trace(self, path: str | Path) -> None:
        """The step as a trace that Perfetto and chrome://tracing open."""
        write_trace(self.timeline, self.graph, Path(path))

    def save_picture(self, path: str | Path, title: str = "Modelled step") -> None:
        """The step as a picture: an HTML page that needs no other file."""
        write_picture(self.timeline, self.graph, Path(path), title=title)


def _plain(question: ExecutionConfig) -> dict[str, Any]:
    shown = {name: getattr(question, name) for name in question.__dataclass_fields__}
    return {**shown, "without": sorted(question.without), "fusion": question.fusion}
