"""The result of pricing a step: its figures as lines, as JSON, as a trace and as a page.

Lines for a terminal have time, modes, shares, memory, layers and recommendations.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, fields
from pathlib import Path
from textwrap import wrap
from typing import Any

from pipeline.backends.ascend.chip.options import Mode
from pipeline.backends.ascend.memory.memory_plan import GIB, MemoryPlan
from pipeline.backends.ascend.report.explanation import describe_range, describe_track_record
from pipeline.backends.ascend.report.priced_step import PricedStep
from pipeline.backends.ascend.report.timeline_files import LABELS, render_picture, write_trace
from pipeline.backends.ascend.simulate.timeline import FORMAT
from pipeline.backends.ascend.tune.autotune import TuneResult
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.value_text import count_noun, format_duration

MAX_LAYERS = 10
"""Largest number of layers that are listed, in lines and in JSON."""
NO_BREAK_SPACE = "\N{NO-BREAK SPACE}"
LIMITS = {
    "cube": "products of matrices on the cube",
    "vector": "the vector unit",
    "memory": "traffic to and from device memory",
    "format": "conversion of types and layouts",
    "communication": "all-reduces that no computation hides",
    "ai_cpu": "operators on the AI CPU",
    "interval": "GetNext and loop control between two steps",
    "host launch": "launches by the host",
    "host data": "preparation of data by the host",
    "pcie": "copies of batches over PCIe",
}
"""Meaning of each limit of a step, by `Report.bound`."""
PIPELINES = {
    "cube": "cube",
    "vector": "vector unit",
    "memory": "MTE2 and MTE3 at device memory",
    "l2": "MTE2 and MTE3 at the L2",
    "floor": "start of a task",
    "ai_cpu": "AI CPU",
    "link": "links",
}
"""Names of a core's pipelines by what limits a task, `TaskTime.bound`."""
DISTINGUISHABLE = 0.01
"""Smallest predicted gain that the model can distinguish from none."""


@dataclass(frozen=True, eq=False, repr=False)
class Report(PricedStep):
    """The price of one steady step. All figures are modelled.

    `tuning` is None without AutoTune. `modes` has the step by launch mode. Modes that the device
    can't run it in are left out, such as one whose batches don't fit the queue on the device.
    """

    memory: MemoryPlan
    tuning: TuneResult | None
    modes: Mapping[Mode, PricedStep]

    def __str__(self) -> str:
        return format_report(self)

    @property
    def tuned_us(self) -> tuple[float, float]:
        """Microseconds of the tuned products of a step before AutoTune, and after it; else 0."""
        tuned = self.tuning.tasks if self.tuning else ()
        before = sum(task.before_us * task.product.repeat for task in tuned)
        after = sum(task.after_us * task.product.repeat for task in tuned)
        return before, after

    def to_dict(self) -> dict[str, Any]:
        """Return all figures but the tasks, ready for JSON. Keys of times contain `modelled`."""
        before_us, after_us = self.tuned_us
        auto_tune = None
        if self.tuning is not None:
            auto_tune = {
                "operators": len(self.tuning.tasks),
                "modelled_before_ms": before_us / 1e3,
                "modelled_after_ms": after_us / 1e3,
            }
        options = {field.name: getattr(self.config, field.name) for field in fields(self.config)}
        return {
            "hardware": self.chip,
            "question": {**options, "without": sorted(self.config.without)},
            "modelled_step_ms": self.step_ms,
            "modelled_interval_ms": list(self.interval_ms),
            "modelled_table_interval_ms": list(self.table_interval_ms),
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
            "modelled_pipelines": dict(self.pipelines),
            "modelled_inserted_ms": {time.type: time.us / 1e3 for time in self.inserted},
            "modelled_modes_ms": {mode: step.step_ms for mode, step in self.modes.items()},
            "modelled_modes_interval_ms": {
                mode: list(step.interval_ms) for mode, step in self.modes.items()
            },
            "modelled_communication": vars(self.communication) if self.communication else None,
            "bound": self.bound,
            "memory": {
                "verdict": self.memory.verdict,
                "used_bytes": self.memory.used_bytes,
                "pools": {
                    name: {"used_bytes": pool.used_bytes, "limit_bytes": pool.limit_bytes}
                    for name, pool in self.memory.pools.items()
                },
                "components": dict(self.memory.components),
            },
            "auto_tune": auto_tune,
            "layers": [
                {"layer": layer.layer, "modelled_ms": layer.us / 1e3, "share": layer.share}
                for layer in self.layers[:MAX_LAYERS]
            ],
            "coverage": dict(self.coverage),
            "tasks": len(self.graph.tasks),
        }

    def save(self, path: str | Path) -> None:
        """Write `to_dict` as a JSON file."""
        Path(path).write_text(json.dumps(self.to_dict(), indent=2) + "\n")

    def save_trace(self, path: str | Path) -> None:
        """Write the step as a trace that Perfetto and chrome://tracing open."""
        write_trace(self.timeline, self.graph, Path(path))

    def save_picture(self, path: str | Path, title: str = "Modelled step") -> None:
        """Write the step as an HTML page without script or other files."""
        write_whole(Path(path), render_picture(self.timeline, self.graph, title))


@dataclass(frozen=True, slots=True)
class Recommendation:
    """A change of a step's options, with its predicted effect.

    `what` describes the change, `override` has the arguments that make it, such as
    `train.sink_size=9`. `gain` is the predicted relative increase of samples per second.
    """

    kind: str
    what: str
    override: str
    step_ms: float
    samples_per_s: float
    gain: float

    @property
    def distinguishable(self) -> bool:
        """Whether the gain is at least `DISTINGUISHABLE`."""
        return self.gain >= DISTINGUISHABLE

    @property
    def gain_text(self) -> str:
        """The gain in percent, if it is distinguishable."""
        return f"{self.gain:+.1%}" if self.distinguishable else "not distinguishable"

    def __str__(self) -> str:
        return f"{self.override}: {self.what}, {self.gain_text}"


def format_report(
    report: Report, changes: Sequence[Recommendation] | None = None, steps: int | None = None
) -> str:
    """Return the main figures of a report, about 40 lines of at most 100 columns.

    `changes` are recommendations, best first, None if there was no search. `steps` is the length of
    the run, None if unknown.
    """
    lines = [
        *_format_head(report, steps),
        "",
        *_format_modes(report),
        "",
        *_format_shares(report),
        "",
        *_format_tuning(report),
        *_format_memory(report),
        "",
        *_format_layers(report),
    ]
    if changes is not None:
        lines += ["", *_format_changes(report, changes)]
    return "\n".join(lines)


def _name_unit(report: Report) -> str:
    return "images/s" if report.batch_pixels else "samples/s"


def name_devices(devices: int, chip: str) -> str:
    """Return the name of a number of devices: `8 x Ascend 910A`."""
    return f"{devices:,} x {chip}" if devices > 1 else chip


def _format_head(report: Report, steps: int | None) -> Iterator[str]:
    config = report.config
    sink_text = f" of {config.sink_size:,} steps" if config.mode == "loop_sink" else ""
    types = config.precision or "types as traced"
    batch = f"{report.batch_size * config.devices:,}"
    if config.devices > 1:
        batch += f" ({report.batch_size:,} a device)"
    chips = name_devices(config.devices, report.chip)
    yield f"MODELLED, not measured: {chips}, batch {batch}, {types}, {config.mode}{sink_text}"
    low, high = report.interval_ms
    yield (
        f"  step       {report.step_ms:,.2f} ms, 80 % interval {low:,.2f} to {high:,.2f} ms; "
        f"{report.samples_per_s:,.0f} {_name_unit(report)}"
    )
    yield f"             {describe_range(report)};"
    yield from (f"             {line}" for line in describe_track_record(report))
    if report.hardware.other_chip_spread_ratio:
        yield "             wide, as the fit has no kernel and no step of this chip"
    if steps is not None:
        duration = format_duration(report.step_ms * steps / 1e3)
        yield f"  in all     {duration} ({count_noun(steps, 'step')})"
    yield f"  limit      {report.bound}: {LIMITS[report.bound]}"
    slowest = _list_slowest_types(report)
    if slowest:
        yield f"             above all {slowest}"


def _list_slowest_types(report: Report) -> str:
    """Return the two op types that take most of the limiting resource's time, with their shares."""
    type_us: dict[str, float] = {}
    for cost in report.tasks:
        task = cost.task
        # A task with the time of an empty kernel (`floor`) counts as bound by its engine.
        engine = cost.time.bound if cost.time.bound in LIMITS else task.engine
        limit = "format" if task.cost_class in FORMAT else engine
        if limit == report.bound:
            type_us[task.type] = type_us.get(task.type, 0.0) + cost.us
    slowest = sorted(type_us, key=lambda name: (-type_us[name], name))[:2]
    return ", ".join(f"{name} {type_us[name] / report.timeline.step_us:.0%}" for name in slowest)


def _format_modes(report: Report) -> Iterator[str]:
    yield f"  {'mode':<12}{'ms a step':>12}{'80 % interval':>24}{_name_unit(report):>14}"
    for mode, step in report.modes.items():
        low, high = step.interval_ms
        mark = "  <- the recipe's" if mode == report.config.mode else ""
        yield (
            f"  {mode:<12}{step.step_ms:>12,.2f}{f'{low:,.2f} to {high:,.2f}':>24}"
            f"{step.samples_per_s:>14,.0f}{mark}"
        )


def _format_shares(report: Report) -> Iterator[str]:
    yield from _wrap_cells("shares", {LABELS[kind]: part for kind, part in report.shares.items()})
    limits = {PIPELINES[bound]: share for bound, share in report.pipelines.items()}
    yield from _wrap_cells("pipelines", limits)
    inserted = [f"{time.tasks:,} {time.type} {time.share:.1%}" for time in report.inserted]
    if inserted:
        yield f"  inserted   {', '.join(inserted)}"
    if report.communication is not None:
        yield f"  all-reduce {report.communication}"
    trace = report.iteration
    yield (
        f"  iteration  {trace.iteration_us / 1e3:,.2f} ms = data tail "
        f"{trace.interval_us / 1e3:,.2f} + FP and BP {trace.fp_bp_us / 1e3:,.2f} + "
        f"aggregation and update tail {trace.tail_us / 1e3:,.2f}"
    )


def _wrap_cells(title: str, shares: Mapping[str, float]) -> Iterator[str]:
    """Yield lines of names with their shares, none of which is broken."""
    cells = [f"{name} {share:.1%}" for name, share in shares.items()]
    lines = wrap(", ".join(cell.replace(" ", NO_BREAK_SPACE) for cell in cells), 86)
    first, *further = (line.replace(NO_BREAK_SPACE, " ") for line in lines or [""])
    yield f"  {title:<11}{first}".rstrip()
    yield from (" " * 13 + line for line in further)


def _format_tuning(report: Report) -> Iterator[str]:
    if report.tuning is not None and report.tuning.tasks:
        before, after = report.tuned_us
        count = len(report.tuning.tasks)
        yield (
            f"  auto_tune  {count} products: {before / 1e3:,.2f} ms with default tiles, "
            f"{after / 1e3:,.2f} with those found ({after / before - 1:+.1%})"
        )
        yield ""


def _format_memory(report: Report) -> Iterator[str]:
    plan = report.memory
    pools = [
        f"{name} {pool.used_bytes / GIB:.2f} of {pool.limit_bytes / GIB:.0f}"
        for name, pool in plan.pools.items()
    ]
    if report.config.devices == 1:
        yield f"  memory     {plan.verdict}; in GiB: {', '.join(pools)}"
        return
    yield f"  memory     {plan.verdict} on each device; in GiB: {', '.join(pools[:-1])},"
    yield f"             {pools[-1]}"


def _format_layers(report: Report) -> Iterator[str]:
    slowest = report.layers[:MAX_LAYERS]
    width = max((len(layer.layer) for layer in slowest), default=0)
    width = min(max(width, len("slowest layers")), 60)
    yield f"  {'slowest layers':<{width}}{'ms':>10}{'of all':>9}{'tasks':>7}"
    for layer in slowest:
        name = layer.layer if len(layer.layer) <= width else f"...{layer.layer[3 - width :]}"
        yield f"  {name:<{width}}{layer.us / 1e3:>10,.3f}{layer.share:>9.1%}{layer.tasks:>7}"


def _format_changes(report: Report, changes: Sequence[Recommendation]) -> Iterator[str]:
    yield "  what would help most"
    if not changes:
        yield "    nothing that was tried"
    for change in changes:
        rate = f"{change.samples_per_s:,.0f} {_name_unit(report)}"
        yield f"    {change.gain_text:>19}  {rate:>18}  {change.override}  ({change.what})"
