"""Causes that the model left out, by a rule: `python -m benchmarks.ascend_fit.causes`.

A cause is priced with and without, on the described rows of the part `fit`. Each network in turn is
left out of the fit of the populations, and its error is the mean distance of the log of published
time from the log of the expected one. A cause is accepted if the mean over networks falls by more
than the standard error of the differences. Some causes are work that the compiler's passes change,
others a time that is fitted: of a step, or of each array, task or byte of it. Takes half an hour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace

import numpy as np

from benchmarks.ascend_fit.populations import Deviation, leave_networks_out, measure_deviations
from pipeline.backends.ascend.compiler.vendor_ops import RESIZE_OPS
from pipeline.backends.ascend.cost.efficiency import load_calibration
from pipeline.backends.ascend.published.scores import Population, PricedRow, load_classes
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    Published,
    load_published_steps,
    price_row,
)

CAUSES = {"resizes are one op": frozenset({RESIZE_OPS})}
"""Passes of the compiler that a step without the cause lacks."""


@dataclass(frozen=True)
class CountedRow:
    """A row, and what a time besides the modelled one may be of: arrays, tasks, bytes, devices."""

    deviation: Deviation
    arrays: int
    tasks: int
    gradient_bytes: int
    devices: int


def _of_graphs(count: Callable[[CountedRow], float]) -> Callable[[CountedRow], float]:
    return lambda row: 0.0 if row.deviation.eager else count(row)


COUNTS: Mapping[str, Callable[[CountedRow], float]] = {
    "graph": _of_graphs(lambda row: 1.0),
    "eager": lambda row: float(row.deviation.eager),
    "array": _of_graphs(lambda row: row.arrays),
    "task": _of_graphs(lambda row: row.tasks),
    "byte": _of_graphs(lambda row: row.gradient_bytes),
    "devices": _of_graphs(lambda row: float(row.devices > 1)),
    "eager task": lambda row: row.tasks * float(row.deviation.eager),
}
"""Multiples of a time in a row's step."""


@dataclass(frozen=True)
class AddedTime:
    """A time that is fitted to a population, in place of another one or beside it."""

    name: str
    population: Population
    after: tuple[str, ...]
    before: tuple[str, ...] = ()


ADDED_TIMES = (
    AddedTime("fixed time in graph mode", "community", ("graph",)),
    AddedTime("fixed time in graph mode", "tuned", ("graph",)),
    AddedTime("fixed time in eager mode too", "community", ("graph", "eager"), ("graph",)),
    AddedTime("fixed time in eager mode", "tuned", ("eager",)),
    AddedTime("time of each array instead", "community", ("array",), ("graph",)),
    AddedTime("time of each array too", "community", ("graph", "array"), ("graph",)),
    AddedTime("time of each task instead", "community", ("task",), ("graph",)),
    AddedTime("time of each task too", "community", ("graph", "task"), ("graph",)),
    AddedTime("time of each byte too", "community", ("graph", "byte"), ("graph",)),
    AddedTime("fixed time on several devices too", "community", ("graph", "devices"), ("graph",)),
    AddedTime("time of each eager task too", "community", ("graph", "eager task"), ("graph",)),
    AddedTime("time of each eager task", "tuned", ("eager task",)),
)
"""All that were tried. The first is adopted (`WITH_FIXED_TIME`)."""


@dataclass(frozen=True)
class Comparison:
    """Mean errors of networks without and with a cause; `gain` is the first minus the second."""

    networks: int
    before: float
    after: float
    gain: float
    standard_error: float

    @property
    def is_accepted(self) -> bool:
        """Whether the gain is above its standard error."""
        return self.gain > self.standard_error

    def __str__(self) -> str:
        verdict = "accepted" if self.is_accepted else "not accepted"
        return (
            f"{self.networks} networks, mean error of the log {self.before:.3f} without, "
            f"{self.after:.3f} with; gain {self.gain:.4f}, standard error "
            f"{self.standard_error:.4f}: {verdict}"
        )


def measure_network_errors(rows: Sequence[Deviation]) -> Mapping[str, float]:
    """Return each network's mean error of the log, by a fit of its population to the others.

    Times are fitted too if the rows have counts.
    """
    errors: dict[str, list[float]] = defaultdict(list)
    for row in leave_networks_out(rows, fixed=bool(rows[0].counts)):
        errors[row.network].append(abs(row.log_error))
    return {network: float(np.mean(each)) for network, each in errors.items()}


def compare_causes(
    before: Mapping[str, Sequence[Deviation]], after: Mapping[str, Sequence[Deviation]]
) -> Comparison:
    """Compare rows without and with a cause, by population.

    A network in both populations has the mean of both errors.
    """
    pairs: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for population, rows in before.items():
        old, new = measure_network_errors(rows), measure_network_errors(after[population])
        for network, error in old.items():
            pairs[network].append((error, new[network]))
    errors = np.array([np.mean(each, axis=0) for each in pairs.values()])
    gains = errors[:, 0] - errors[:, 1]
    before_mean, after_mean = errors.mean(0).tolist()
    return Comparison(
        len(errors),
        before_mean,
        after_mean,
        float(gains.mean()),
        float(gains.std(ddof=1) / math.sqrt(len(gains))),
    )


def set_counts(rows: Sequence[CountedRow], names: Sequence[str]) -> list[Deviation]:
    """Return rows with their counts by name, over the median of those above 0."""
    columns = []
    for name in names:
        counts = np.array([COUNTS[name](row) for row in rows])
        columns.append(counts / np.median(counts[counts > 0]))
    table = np.array(columns).T if columns else np.zeros((len(rows), 0))
    return [
        replace(row.deviation, counts=tuple(counts))
        for row, counts in zip(rows, table.tolist(), strict=True)
    ]


def compare_times(rows: Sequence[CountedRow], time: AddedTime) -> Comparison:
    """Compare the rows of a population without and with a time."""
    before, after = (set_counts(rows, names) for names in (time.before, time.after))
    population: str = time.population
    return compare_causes({population: before}, {population: after})


def price_without(row: Published, without: frozenset[str]) -> PricedRow:
    """Return the price of a row whose compiler lacks some passes, with an empty interval."""
    step_ms = price_row(row, load_calibration(), without=without).step_ms
    return PricedRow(row, step_ms, step_ms, step_ms)


def count_row(row: Published) -> tuple[Population, CountedRow]:
    """Return the population of a row, and the row with its counts."""
    step = price_row(row, load_calibration())
    population = load_classes()[row.id].population
    priced_row = PricedRow(row, step.step_ms, step.step_ms, step.step_ms)
    (deviation,) = measure_deviations([priced_row], population)
    sizes = [nbytes for _, nbytes, _ in step.graph.gradients]
    tasks = sum(task.repeat for task in step.graph.tasks)
    return population, CountedRow(deviation, len(sizes), tasks, sum(sizes), row.devices)


def main() -> None:
    """Price the rows of `fit` with all causes, and without each, and print the comparisons."""
    classes = load_classes()
    rows = [row for row in load_published_steps(DESCRIBED) if classes[row.id].part == "fit"]
    by_population: dict[Population, list[CountedRow]] = {"tuned": [], "community": []}
    for row in rows:
        population, counted = count_row(row)
        by_population[population].append(counted)
    after: dict[str, list[Deviation]] = {
        name: set_counts(each, ()) for name, each in by_population.items()
    }
    for name, passes in CAUSES.items():
        priced_rows = [price_without(row, passes) for row in rows]
        before = {name: measure_deviations(priced_rows, name) for name in after}
        print(f"{name}: {compare_causes(before, after)}")
    for time in ADDED_TIMES:
        comparison = compare_times(by_population[time.population], time)
        print(f"{time.name}, {time.population}: {comparison}", flush=True)


if __name__ == "__main__":
    main()
