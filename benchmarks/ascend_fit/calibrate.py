"""Fit the calibration to published steps: `python -m benchmarks.ascend_fit.calibrate`.

It has few parameters, each with a prior: the log of a multiplier for every group of classes, and a
task's time beyond its kernel. The loss is Huber's on log(modelled / published), one-sided for rows
that the host's pipeline may have bounded; a row of a family of n weighs 1 / sqrt(n). A step counts
as linear in the groups' times, which holds for one step of a stream.
"""

from __future__ import annotations

import csv
import math
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import yaml
from scipy.optimize import least_squares

from pipeline.backends.ascend.cost.efficiency import (
    CALIBRATION_FILE,
    GROUPS,
    NORMAL_90,
    calibrate_with,
)
from pipeline.backends.ascend.published.workloads import (
    LEFT_OUT_FILE,
    Published,
    load_published_steps,
    price_row,
)

PRIOR_LOG_SD = {"products": 0.05, "windows": 0.55, "normalisation": 0.15, "depthwise": 0.15}
"""Prior spread of each group's multiplier. Published steps of one network differ by a third
between software releases, so they change products little, which were timed in two networks.
Poolings were timed only in AlexNet, which has three, and differ by this deviation (`log_sd` of
their classes in efficiency.yaml)."""
TASK_US_PRIOR = (1.0, 0.7)
"""Mean and spread: the floors come from AlexNet, whose kernels are few and large."""
HUBER = 0.2
PROBES = ("MS0081", "TR0341", "PT0661")
"""Rows whose step at multiplier 1 is in the file: if it changes, the calibration is outdated, as
once by changes of networks, which seemed to have no effect on the emulator."""


@dataclass(frozen=True)
class Parts:
    """A published row, and its modelled step in ms by groups.

    `groups` are the groups' work at multiplier 1, `tasks` the number of tasks in thousands,
    `fixed_ms` the part that no parameter changes; `spread` is the standard deviation from its
    classes' spreads.
    """

    row: Published
    groups: np.ndarray
    tasks: float
    fixed_ms: float
    spread: float

    def step_ms(self, point: np.ndarray) -> float:
        """Return the step at (log multipliers, task_us)."""
        return float(self.fixed_ms + self.groups @ np.exp(-point[:-1]) + self.tasks * point[-1])


def split_by_group(row: Published) -> Parts:
    """Price a row with each group at twice its rate; the time saved is half the group's work."""
    ones = dict.fromkeys(GROUPS, 1.0)
    step = price_row(row, calibrate_with(ones, 0.0))
    groups = []
    for group in GROUPS:
        faster = price_row(row, calibrate_with({**ones, group: 2.0}, 0.0))
        groups.append(2 * (step.step_ms - faster.step_ms))
    tasks = sum(task.repeat for task in step.graph.tasks if task.engine in ("cube", "vector"))
    fixed_ms = step.step_ms - sum(groups)
    return Parts(row, np.array(groups), tasks / 1e3, fixed_ms, step.class_spread)


def unit_ms(part: Parts) -> float:
    """Return a row's modelled step with all multipliers at 1 and no time between tasks."""
    return part.fixed_ms + float(part.groups.sum())


def fit(parts: Sequence[Parts]) -> np.ndarray:
    """Return the best parameters, by scipy's trust-region least squares."""
    families = Counter(part.row.family for part in parts)
    weights = np.array([families[part.row.family] ** -0.5 for part in parts])
    spreads = [PRIOR_LOG_SD[group] for group in GROUPS]
    means = np.append(np.zeros(len(GROUPS)), TASK_US_PRIOR[0])
    lowest = np.append(np.full(len(GROUPS), -np.inf), 0.0)

    def compute_residuals(point: np.ndarray) -> np.ndarray:
        distances = (point - means) / [*spreads, TASK_US_PRIOR[1]]
        return np.append(_compute_errors(parts, point) / HUBER, distances)

    def compute_loss(squares: np.ndarray) -> np.ndarray:
        rows, priors = np.split(squares, [len(parts)])
        prior_loss = [priors, np.ones_like(priors), np.zeros_like(priors)]
        return np.hstack([weights * _huber(rows), prior_loss])

    return least_squares(compute_residuals, means, loss=compute_loss, bounds=(lowest, np.inf)).x


def _huber(squares: np.ndarray) -> np.ndarray:
    """Return Huber's loss of squared residuals, and its first and second derivative by them."""
    sizes = np.sqrt(np.maximum(squares, 1.0))
    inside = squares <= 1
    return np.array(
        [np.where(inside, squares, 2 * sizes - 1), 1 / sizes, np.where(inside, 0, -(sizes**-3) / 2)]
    )


def _compute_errors(parts: Sequence[Parts], point: np.ndarray) -> np.ndarray:
    """Return log(modelled / published) by row, 0 if it is within a bound."""
    errors = np.log([part.step_ms(point) / part.row.ms for part in parts])
    bounds = [part.row.quality != "device" for part in parts]
    return np.where(bounds, np.maximum(errors, 0.0), errors)


def left_out_errors(parts: Sequence[Parts]) -> np.ndarray:
    """Return log(modelled / published) of every row, by the fit to all other families."""
    errors = np.zeros(len(parts))
    for family in sorted({part.row.family for part in parts}):
        point = fit([part for part in parts if part.row.family != family])
        for index, part in enumerate(parts):
            if part.row.family == family:
                errors[index] = math.log(part.step_ms(point) / part.row.ms)
    return errors


def measure_spread(parts: Sequence[Parts]) -> tuple[float, float]:
    """Return the spread beyond the classes' spreads, and the scale that puts 80 % of rows inside.

    Families weigh as in the fit. The first is the normal standard deviation that corresponds to the
    median absolute error of held-out rows (0.6745 is the normal's 75th percentile).
    """
    device = [index for index, part in enumerate(parts) if part.row.quality == "device"]
    errors = np.abs(left_out_errors(parts))[device]
    families = Counter(parts[index].row.family for index in device)
    weights = np.array([families[parts[index].row.family] ** -0.5 for index in device])
    log_sd = quantile(errors, weights, 0.5) / 0.6745
    spreads = np.hypot([parts[index].spread for index in device], log_sd)
    return log_sd, quantile(errors / spreads, weights, 0.8) / NORMAL_90


def quantile(values: np.ndarray, weights: np.ndarray, share: float) -> float:
    """Return the weighted quantile: the least value with this share of the weight below it."""
    order = np.argsort(values, kind="stable")
    reached = np.cumsum(weights[order]) / weights.sum()
    return float(values[order][np.searchsorted(reached, share)])


def split_rows(
    watch: Callable[[Published], None] = lambda row: None,
) -> tuple[Parts, ...]:
    """Return all rows of the fit, by groups."""
    parts = []
    for row in load_published_steps():
        if row.quality != "pair":
            watch(row)
            parts.append(split_by_group(row))
    return tuple(parts)


def calibrate_left_out(parts: Sequence[Parts]) -> list[dict[str, str | float]]:
    """Return the calibration by all other rows for each family of published steps.

    The columns are as in left_out.csv.
    """
    rows: list[dict[str, str | float]] = []
    for family in sorted({row.family for row in load_published_steps()}):
        other_parts = [part for part in parts if part.row.family != family]
        log_sd, scale = measure_spread(other_parts)
        multipliers, task_us = round_parameters(fit(other_parts), 6)
        spreads = {"log_sd": round(log_sd, 6), "interval_scale": round(scale, 6)}
        rows.append({"family": family, **multipliers, "task_us": task_us, **spreads})
    return rows


def round_parameters(point: np.ndarray, digits: int) -> tuple[dict[str, float], float]:
    """Return the multipliers by group and the time of a task in us, rounded."""
    multipliers = np.round(np.exp(point[:-1]), digits).tolist()
    return dict(zip(GROUPS, multipliers, strict=True)), round(float(point[-1]), digits)


def main() -> None:
    """Fit with all rows and without each family; write calibration.yaml and left_out.csv."""
    parts = split_rows(lambda row: print(f"pricing {row.id} {row.model}", flush=True))
    log_sd, scale = measure_spread(parts)
    multipliers, task_us = round_parameters(fit(parts), 3)
    calibration = {
        "multipliers": multipliers,
        "task_us": task_us,
        "log_sd": round(log_sd, 3),
        "interval_scale": round(scale, 3),
        "probes": {part.row.id: round(unit_ms(part), 4) for part in parts if part.row.id in PROBES},
    }
    head = "# Written by python -m benchmarks.ascend_fit.calibrate; see efficiency.py\n"
    text = yaml.safe_dump(calibration, sort_keys=False)
    CALIBRATION_FILE.write_text(head + text, encoding="utf-8")
    rows = calibrate_left_out(parts)
    with LEFT_OUT_FILE.open("w", newline="", encoding="utf-8") as file:
        writer = csv.DictWriter(file, rows[0], lineterminator="\n")
        writer.writeheader()
        writer.writerows(rows)
    print(text)


if __name__ == "__main__":
    main()
