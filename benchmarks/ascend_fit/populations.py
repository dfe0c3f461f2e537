"""Fit how much slower steps are than modelled: `python -m benchmarks.ascend_fit.populations`.

The log of published / modelled time of a row is the sum of a population's mean, the deviation of
its mechanism (graph or eager), of its network, and of the row. To the modelled time of a graph's
step the community's code adds a fixed time, which doesn't depend on the network. All but the mean
and this time are normal with a spread of their own. The fit reads the described rows of the part
`fit` alone, and maximises the likelihood (Laird and Ware 1982) times the priors. Each run counts in
`fits_tried`.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import yaml
from scipy.optimize import minimize

from pipeline.backends.ascend.cost.efficiency import (
    NORMAL_90,
    POPULATIONS_FILE,
    load_populations,
)
from pipeline.backends.ascend.published.scores import Part, PricedRow, load_classes
from pipeline.backends.ascend.published.workloads import DESCRIBED, load_published_steps
from pipeline.backends.ascend.validate import price_rows

SPREAD_PRIORS = {"mechanism": 0.2, "network": 0.4, "row": 0.15}
"""Prior spreads: eager and graph of one network differ by about a fifth beyond the model
(`validate`, pairs), releases and settings of one network by 15 % (published.csv). Networks
have the spread of the first 41 rows (docs/ascend910.md), halved, as it has the other two in it."""
PRIOR_LOG_SD = 0.7
"""Spread of the log of each of these, and of the fixed time."""
FIXED_MS = 14.0
"""Prior of the fixed time of a graph's step: what MobileNetV3's steps take without any sample in
`TF0797` and `TF0798` and the rows of the same page."""


WITH_FIXED_TIME = ("community",)
"""Populations whose error of left-out networks the fixed time lowers by more than its standard
error (benchmarks/results/ascend_populations.md)."""


@dataclass(frozen=True)
class Deviation:
    """The log of (published / modelled) of a row, its network, and whether its mode is eager.

    `counts` are how often the step has each of several times that no modelled work explains.
    Without them it has one, in graph mode alone.
    """

    network: str
    eager: bool
    log_ratio: float
    modelled_ms: float = math.inf
    counts: tuple[float, ...] | None = None

    @property
    def times_per_ms(self) -> tuple[float, ...]:
        """Each of the counts over the modelled time."""
        counts = (0.0 if self.eager else 1.0,) if self.counts is None else self.counts
        return tuple(count / self.modelled_ms for count in counts)

    def add_fixed_ms(self, *fixed_ms: float) -> float:
        """Return the log of (published / (modelled + fixed)), for one time each of the counts."""
        added = sum(map(operator.mul, self.times_per_ms, fixed_ms))
        return self.log_ratio - math.log1p(added)


@dataclass(frozen=True)
class LeftOut:
    """A row whose population was fitted without its network: the log of (published / expected)."""

    network: str
    log_error: float
    log_sd: float


def fit_population(rows: Sequence[Deviation], *, fixed: bool = False) -> dict[str, float]:
    """Return the factor of a population, the log spread of each level, and the fixed time.

    Without `fixed` the latter is 0. Further times of `Deviation.counts` are `fixed_ms_2` and so on.

    `mechanism_eager` and `mechanism_graph` are the factors of the mechanisms beyond the
    population's.
    """
    ratios = np.array([row.log_ratio for row in rows])
    per_ms = np.array([row.times_per_ms if fixed else () for row in rows])
    eager = np.array([row.eager for row in rows])
    networks = np.array([row.network for row in rows])
    same_mode = (eager[:, None] == eager).astype(float)
    same_network = (networks[:, None] == networks).astype(float)
    priors = np.log([*SPREAD_PRIORS.values(), *per_ms.shape[1] * [FIXED_MS]])

    def compute_values(logs: np.ndarray) -> np.ndarray:
        return ratios - np.log1p(per_ms @ np.exp(logs[3:]))

    def compute_mean(covariance: np.ndarray, values: np.ndarray) -> float:
        weights = np.linalg.solve(covariance, np.ones(len(values)))
        return float(weights @ values / weights.sum())

    def make_covariance(logs: np.ndarray) -> np.ndarray:
        mechanism, network, row = np.exp(2 * logs[:3])
        return mechanism * same_mode + network * same_network + row * np.eye(len(ratios))

    def compute_loss(logs: np.ndarray) -> float:
        covariance = make_covariance(logs)
        values = compute_values(logs)
        residuals = values - compute_mean(covariance, values)
        squares = residuals @ np.linalg.solve(covariance, residuals)
        likelihood = np.linalg.slogdet(covariance)[1] + squares
        return float(likelihood + np.sum(((logs - priors) / PRIOR_LOG_SD) ** 2))

    logs = minimize(compute_loss, priors, method="Nelder-Mead").x
    spreads = dict(zip(SPREAD_PRIORS, np.exp(logs[:3]).tolist(), strict=True))
    covariance = make_covariance(logs)
    values = compute_values(logs)
    mean = compute_mean(covariance, values)
    pulls = np.linalg.solve(covariance, values - mean) * spreads["mechanism"] ** 2
    return {
        "factor": math.exp(mean),
        "mechanism_graph": math.exp(pulls[~eager].sum()),
        "mechanism_eager": math.exp(pulls[eager].sum()),
        **{f"{name}_log_sd": spread for name, spread in spreads.items()},
        **dict(zip(_name_times(per_ms.shape[1]), np.exp(logs[3:]).tolist(), strict=True)),
        **({} if fixed else {"fixed_ms": 0.0}),
    }


def _name_times(count: int) -> list[str]:
    return [f"fixed_ms_{number}" if number > 1 else "fixed_ms" for number in range(1, count + 1)]


def leave_networks_out(rows: Sequence[Deviation], *, fixed: bool = False) -> list[LeftOut]:
    """Return each row's distance from what a fit to the other networks expects."""
    left_out = []
    for network in dict.fromkeys(row.network for row in rows):
        others = [row for row in rows if row.network != network]
        fitted = fit_population(others, fixed=fixed)
        log_sd = math.hypot(fitted["network_log_sd"], fitted["row_log_sd"])
        for row in rows:
            if row.network == network:
                mechanism = fitted["mechanism_eager" if row.eager else "mechanism_graph"]
                expected = math.log(fitted["factor"] * mechanism)
                times = _name_times(len(row.times_per_ms))
                log_ratio = row.add_fixed_ms(*(fitted[name] for name in times if fixed))
                left_out.append(LeftOut(network, log_ratio - expected, log_sd))
    return left_out


def fit_interval_scale(rows: Sequence[Deviation], *, fixed: bool = False) -> float:
    """Return the scale of the log of the 80 % interval that covers 80 % of rows, each left out."""
    distances = [abs(row.log_error) / row.log_sd for row in leave_networks_out(rows, fixed=fixed)]
    return float(np.quantile(distances, 0.8)) / NORMAL_90


def measure_deviations(
    priced_rows: Sequence[PricedRow], population: str, part: Part = "fit"
) -> list[Deviation]:
    """Return the deviations of a population's rows of a part."""
    classes = load_classes()
    return [
        Deviation(
            classes[priced_row.row.id].network,
            priced_row.row.mode == "op_by_op",
            -math.log1p(priced_row.error),
            priced_row.modelled_ms,
        )
        for priced_row in priced_rows
        if classes[priced_row.row.id].part == part
        and classes[priced_row.row.id].population == population
    ]


def describe_population(rows: Sequence[Deviation], *, fixed: bool = False) -> dict[str, float]:
    """Return a population's entry in populations.yaml: its fit, and what the fit read."""
    fit = fit_population(rows, fixed=fixed)
    fitted = {key: round(value, 3) for key, value in fit.items()}
    return {
        **fitted,
        "rows": len(rows),
        "networks": len({row.network for row in rows}),
        "interval_scale": round(fit_interval_scale(rows, fixed=fixed), 3),
    }


def write_populations(priced_rows: Sequence[PricedRow]) -> str:
    """Fit both populations, write populations.yaml and return its text."""
    tried = load_populations().fits_tried + 1 if POPULATIONS_FILE.exists() else 1
    document = {
        "fits_tried": tried,
        "populations": {
            name: describe_population(
                measure_deviations(priced_rows, name), fixed=name in WITH_FIXED_TIME
            )
            for name in ("tuned", "community")
        },
    }
    head = "# Written by python -m benchmarks.ascend_fit.populations; see populations.py\n"
    text = head + yaml.safe_dump(document, sort_keys=False)
    POPULATIONS_FILE.write_text(text, encoding="utf-8")
    return text


def main() -> None:
    """Price the described rows of the part `fit`, and write populations.yaml."""
    classes = load_classes()
    rows = [row for row in load_published_steps(DESCRIBED) if classes[row.id].part == "fit"]
    print(write_populations(price_rows(rows)))


if __name__ == "__main__":
    main()
