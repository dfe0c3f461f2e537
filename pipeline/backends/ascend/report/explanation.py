"""Explanation of a layer's price: formulas, figures with their sources, and its interval."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from textwrap import wrap
from typing import TYPE_CHECKING, Any

from pipeline.backends.ascend.chip.hardware import Hardware
from pipeline.backends.ascend.chip.tasks import Task
from pipeline.backends.ascend.cost.efficiency import GROUPS, load_populations
from pipeline.backends.ascend.cost.task_time import CUBE_CLASSES, runs_on_vector
from pipeline.core.files.safe_yaml import parse_written_yaml
from pipeline.core.files.value_text import count_noun

if TYPE_CHECKING:
    from pipeline.backends.ascend.report.priced_step import PricedStep, TaskCost

WIDTH = 100
"""Columns of the text."""


_FILE = Path(__file__).with_name("formulas.yaml")
_TABLE: Any = parse_written_yaml(_FILE.read_text(encoding="utf-8"))
"""Formula of each class of kernels, and the chip's figures and fitted constants in it."""


def find_formula(task: Task, hw: Hardware) -> dict[str, Any]:
    """Return the formula of a task's price."""
    name: str = task.cost_class
    if name in CUBE_CLASSES:
        name = "float32_product" if runs_on_vector(task, hw) else "product"
    elif name in GROUPS["depthwise"]:
        name = "depthwise"
    formula: dict[str, Any] = _TABLE["formulas"].get(name, _TABLE["formulas"]["stream"])
    return formula


TRACK_RECORD = (
    "interval of 67 steps of 40 networks from outside; 8 of 12 that no fit read are inside.",
    "The modelled time misses such steps by 49 % (median): compare options by it",
)
"""Which published steps the interval comes from, and how far they were from modelled ones, in lines
of a report. They are the described rows of community code, 12 in the part `look`
(benchmarks/results/ascend_populations.md)."""


def describe_track_record(step: PricedStep) -> tuple[str, ...]:
    """Return which steps the interval of a step comes from, in lines of a report."""
    steps = step.measured_steps
    if steps is None:
        return TRACK_RECORD
    counts = f"{count_noun(steps.rows, 'step')} of {count_noun(steps.networks, 'network')}"
    return (f"interval of {counts} of your own, which the chip's file was fitted to",)


def describe_range(step: PricedStep) -> str:
    """Return the step's time in tuned code, and the interval of the community's.

    With a chip's file of measured steps, the interval is of these steps.
    """
    low, high = step.interval_ms
    if step.measured_steps is not None:
        return f"{low:,.2f} to {high:,.2f} ms as your steps run"
    eager = step.config.mode == "op_by_op"
    tuned_ms = load_populations().by_name["tuned"].centre_ms(step.step_ms, eager=eager)
    return (
        f"{tuned_ms:,.2f} ms if as tuned as the zoo, {low:,.2f} to {high:,.2f} as most "
        "repositories run"
    )


@dataclass(frozen=True)
class SourcedNumber:
    """A number of a formula, with its name and its source."""

    name: str
    value: float
    source: str


@dataclass(frozen=True)
class ExplainedTask:
    """One kernel of a layer, with the terms of its price.

    `log_sd` is the spread of log(measured / modelled) of its class, `source` is for the rate of the
    class, `numbers` are the figures and constants of the formula.
    """

    cost: TaskCost
    formula: str
    numbers: tuple[SourcedNumber, ...]
    rate: float
    log_sd: float
    source: str


@dataclass(frozen=True)
class LayerExplanation:
    """Explanation of a layer's time. `str` returns it as text.

    `interval_sources` are the factors and spreads that the step's 80 % interval comes from,
    `track_record` the steps that these were fitted to, `time_range` the step's time in tuned and in
    other code.
    """

    layer: str
    us: float
    share: float
    tasks: tuple[ExplainedTask, ...]
    interval_sources: tuple[SourcedNumber, ...]
    track_record: tuple[str, ...]
    time_range: str

    def __str__(self) -> str:
        return "\n".join(self._format_lines())

    def _format_lines(self) -> Iterator[str]:
        yield (
            f"MODELLED: {self.layer} takes {self.us / 1e3:.3f} ms, {self.share:.1%} of all layers, "
            f"in {len(self.tasks)} tasks"
        )
        inserted = [task.cost for task in self.tasks if task.cost.task.is_inserted]
        if inserted:
            yield (
                f"the compiler inserted {len(inserted)} of them, which take "
                f"{sum(cost.us for cost in inserted) / 1e3:.3f} ms"
            )
        explained: set[str] = set()
        for task in sorted(self.tasks, key=lambda task: -task.cost.us):
            cost = task.cost
            kernel = cost.task
            yield ""
            origin = ", inserted" if kernel.is_inserted else ""
            head = f"{kernel.type} ({kernel.phase}{origin})"
            yield f"{head}: {cost.us:.1f} us, bound by {cost.time.bound}"
            yield f"  at peak rates {cost.roofline_us:.1f} us"
            yield from _wrap_lines(f"formula: {task.formula}")
            yield from _wrap_lines(
                f"rate of its class {task.rate:.3g}, {cost.time.provenance}: {task.source}; spread "
                f"{task.log_sd:.2f}"
            )
            for number in task.numbers:
                if number.name not in explained:
                    explained.add(number.name)
                    yield from _wrap_lines(f"{number.name} = {number.value:g}: {number.source}")
        yield ""
        yield f"the step takes {self.time_range}"
        yield "the interval of the step comes from"
        for number in self.interval_sources:
            yield from _wrap_lines(f"{number.name} {number.value:.3g}: {number.source}")
        yield from _wrap_lines(" ".join(self.track_record))


def _wrap_lines(text: str) -> list[str]:
    return wrap(text, WIDTH, initial_indent="  ", subsequent_indent="    ")


def explain_task(cost: TaskCost, step: PricedStep) -> ExplainedTask:
    """Return the terms of a task's price."""
    task = cost.task
    formula = find_formula(task, step.hardware)
    efficiency = step.calibration.efficiency
    entry = efficiency.classes[task.cost_class]
    source = entry.source
    for group, classes in GROUPS.items():
        if task.cost_class in classes:
            multiplier = step.calibration.multipliers[group]
            source += f"; times {multiplier:.3g}, fitted to published steps ({group})"
    numbers = [
        SourcedNumber(
            name, getattr(step.hardware, name), step.sources.get(name, "given without a source")
        )
        for name in _TABLE["figures"][formula["figures"]]
    ]
    fitted = "fitted to kernels of public traces (efficiency.yaml)"
    numbers += [
        SourcedNumber(name, getattr(efficiency.constants, name), fitted)
        for name in formula.get("constants", ())
    ]
    return ExplainedTask(cost, formula["text"], tuple(numbers), entry.rate, entry.log_sd, source)


def list_interval_sources(step: PricedStep) -> tuple[SourcedNumber, ...]:
    """Return the factors and spreads that make a step's interval."""
    population = step.population
    eager = step.config.mode == "op_by_op"
    whose = "from outside" if step.measured_steps is None else "of your own"
    read = (
        f"{count_noun(population.rows, 'step')} of {count_noun(population.networks, 'network')} "
        f"{whose}"
    )
    ratio = step.hardware.other_chip_spread_ratio
    other_chip = SourcedNumber(
        "spread from chip to chip", ratio, step.sources.get("other_chip_spread_ratio", "")
    )
    return (
        SourcedNumber("factor", population.factor, read),
        SourcedNumber(
            f"factor of {'eager' if eager else 'graph'} mode",
            population.get_mechanism(eager=eager),
            "the steps among them in this mode",
        ),
        SourcedNumber(
            "spread from network to network",
            population.network_log_sd,
            "standard deviation of the log",
        ),
        SourcedNumber("spread of a network's steps", population.row_log_sd, "likewise"),
        SourcedNumber("scale of the interval", population.interval_scale, "steps left out"),
        SourcedNumber("fixed time of a graph's step, ms", population.fixed_ms, read),
        *((other_chip,) if ratio else ()),
    )
