"""Causes that the model left out, by a rule: `python -m benchmarks.ascend_fit.causes`.

A cause is priced with and without, on the described rows of the part `fit`. Each network in turn is
left out of the fit of the populations, and its error is the mean distance of the log of published
time from the log of the expected one. A cause is accepted if the mean over networks falls by more
than the standard error of the differences. Takes half an hour.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np

from benchmarks.ascend_fit.populations import Deviation, leave_networks_out, measure_deviations
from pipeline.backends.ascend.compiler.resizes import RESIZE_OPS
from pipeline.backends.ascend.cost.efficiency import load_calibration
from pipeline.backends.ascend.published.scores import PricedRow, load_classes
from pipeline.backends.ascend.published.workloads import (
    DESCRIBED,
    Published,
    load_published_steps,
    price_row,
)

CAUSES = {"resizes are one op": frozenset({RESIZE_OPS})}
"""Passes of the compiler that a step without the cause lacks."""


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
    """Return each network's mean error of the log, by a fit of its population to the others."""
    errors: dict[str, list[float]] = defaultdict(list)
    for row in leave_networks_out(rows):
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


def price_without(row: Published, without: frozenset[str]) -> PricedRow:
    """Return the price of a row whose compiler lacks some passes, with an empty interval."""
    step_ms = price_row(row, load_calibration(), without=without).step_ms
    return PricedRow(row, step_ms, step_ms, step_ms)


def main() -> None:
    """Price the rows of `fit` with all causes, and without each, and print the comparisons."""
    classes = load_classes()
    rows = [row for row in load_published_steps(DESCRIBED) if classes[row.id].part == "fit"]

    def price(without: frozenset[str]) -> dict[str, list[Deviation]]:
        priced_rows = [price_without(row, without) for row in rows]
        return {name: measure_deviations(priced_rows, name) for name in ("tuned", "community")}

    after = price(frozenset())
    for name, passes in CAUSES.items():
        print(f"{name}: {compare_causes(price(passes), after)}")


if __name__ == "__main__":
    main()
