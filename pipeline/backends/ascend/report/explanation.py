"""Explanation of a layer's price: formulas, figures with their sources, and its interval."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import Any

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import Task, TaskTime
from pipeline.backends.ascend.cost.efficiency import GROUPS, Calibration
from pipeline.backends.ascend.cost.task_time import CUBE_CLASSES, runs_on_vector
from pipeline.core.files.safe_yaml import parse_written_yaml

WIDTH = 100
"""Columns of the text."""


@dataclass(frozen=True)
class KernelFormula:
    """Formula of a class of kernels, and the chip's figures and fitted constants in it."""

    text: str
    figures: tuple[str, ...]
    constants: tuple[str, ...] = ()


def _load_formulas() -> dict[str, KernelFormula]:
    file = Path(__file__).with_name("formulas.yaml")
    table: Any = parse_written_yaml(file.read_text(encoding="utf-8"))
    return {
        name: KernelFormula(
            entry["text"],
            tuple(table["figures"][entry["figures"]]),
            tuple(entry.get("constants", ())),
        )
        for name, entry in table["formulas"].items()
    }


FORMULAS = _load_formulas()


def find_formula(task: Task, hw: Hardware) -> KernelFormula:
    """Return the formula of a task's price."""
    name: str = task.cost_class
    if name in CUBE_CLASSES:
        name = "float32_product" if runs_on_vector(task, hw) else "product"
    elif name in GROUPS["depthwise"]:
        name = "depthwise"
    return FORMULAS.get(name, FORMULAS["stream"])


@dataclass(frozen=True)
class SourcedNumber:
    """A number of a formula, with its name and its source."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class ExplainedTask:
    """One kernel of a layer: its time in us, with all repetitions, and the terms of its price.

    `log_sd` is the spread of log(measured / modelled) of its class. `provenance` and `source` are
    for the rate of the class.
    """

    type: str
    phase: str
    us: float
    roofline_us: float
    bound: str
    formula: str
    figures: tuple[SourcedNumber, ...]
    constants: tuple[SourcedNumber, ...]
    rate: float
    log_sd: float
    provenance: str
    source: str
    inserted: bool
    """Whether the compiler inserted the kernel, as in `Task.is_inserted`."""


@dataclass(frozen=True)
class LayerExplanation:
    """Explanation of a layer's time. `str` returns it as text.

    `interval_sources` are the log standard deviations that the step's 80 % interval comes from.
    """

    layer: str
    us: float
    share: float
    tasks: tuple[ExplainedTask, ...]
    interval_sources: tuple[SourcedNumber, ...]

    def __str__(self) -> str:
        return "\n".join(self._format_lines())

    def _format_lines(self) -> Iterator[str]:
        yield (
            f"MODELLED: {self.layer} takes {self.us / 1e3:.3f} ms, {self.share:.1%} of all layers, "
            f"in {len(self.tasks)} tasks"
        )
        inserted = [task for task in self.tasks if task.inserted]
        if inserted:
            yield (
                f"the compiler inserted {len(inserted)} of them, which take "
                f"{sum(task.us for task in inserted) / 1e3:.3f} ms"
            )
        explained: set[str] = set()
        for task in sorted(self.tasks, key=lambda task: -task.us):
            yield ""
            origin = ", inserted" if task.inserted else ""
            yield f"{task.type} ({task.phase}{origin}): {task.us:.1f} us, bound by {task.bound}"
            yield f"  at peak rates {task.roofline_us:.1f} us"
            yield from _wrap_lines(f"formula: {task.formula}")
            yield from _wrap_lines(
                f"rate of its class {task.rate:.3g}, {task.provenance}: {task.source}; spread "
                f"{task.log_sd:.2f}"
            )
            for number in (*task.figures, *task.constants):
                if number.name not in explained:
                    explained.add(number.name)
                    yield from _wrap_lines(f"{number.name} = {number.value:g}: {number.source}")
        yield ""
        yield "the interval of the step comes from"
        for number in self.interval_sources:
            yield from _wrap_lines(f"{number.name} {number.value:.3g}: {number.source}")


def _wrap_lines(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def explain_task(
    task: Task,
    time: TaskTime,
    hardware: Hardware,
    sources: Mapping[str, str],
    calibration: Calibration,
) -> ExplainedTask:
    """Return the terms of a task's price. `sources` are the sources of figures, by name."""
    formula = find_formula(task, hardware)
    entry = calibration.efficiency.classes[task.cost_class]
    constants = calibration.efficiency.constants
    source = entry.source
    for group, classes in GROUPS.items():
        if task.cost_class in classes:
            multiplier = calibration.multipliers[group]
            source += f"; times {multiplier:.3g}, fitted to published steps ({group})"
    without_source = "given without a source"
    fitted = "fitted to kernels of public traces (efficiency.yaml)"
    return ExplainedTask(
        type=task.type,
        phase=task.phase,
        us=time.us * task.repeat,
        roofline_us=time.roofline_us * task.repeat,
        bound=time.bound,
        formula=formula.text,
        figures=tuple(
            SourcedNumber(name, getattr(hardware, name), sources.get(name, without_source))
            for name in formula.figures
        ),
        constants=tuple(
            SourcedNumber(name, getattr(constants, name), fitted) for name in formula.constants
        ),
        rate=entry.rate,
        log_sd=entry.log_sd,
        provenance=entry.provenance,
        source=source,
        inserted=task.is_inserted,
    )


def list_interval_sources(
    class_spread: float,
    calibration: Calibration,
    hardware: Hardware,
    sources: Mapping[str, str],
) -> tuple[SourcedNumber, ...]:
    """Return the spreads that make a step's interval; `class_spread` is the spread of the
    classes."""
    name = "other_chip_spread_ratio"
    ratio = hardware.other_chip_spread_ratio
    other_chip = SourcedNumber("spread from chip to chip", ratio, sources.get(name, ""))
    return (
        SourcedNumber(
            "spread of the classes",
            class_spread,
            "residuals of the traces' kernels, each class by its share of the step",
        ),
        SourcedNumber(
            "spread of whole steps",
            calibration.log_sd,
            "published steps of families that the fit left out",
        ),
        *((other_chip,) if ratio else ()),
        SourcedNumber(
            "scale", calibration.interval_scale, "makes an 80 % interval cover 80 % of those steps"
        ),
    )
