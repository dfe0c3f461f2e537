"""Uncertainty of a step's time: the spread of its kernels' classes and of published steps."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence

from pipeline.backends.ascend.chip.tasks import TaskGraph, TaskTime
from pipeline.backends.ascend.cost.calibration import Calibration
from pipeline.backends.ascend.simulate.timeline import Timeline

NORMAL_90 = 1.2816
"""The 90th percentile of the normal distribution: a tenth lies above, a tenth below the mirror."""


def interval_of(
    graph: TaskGraph, times: Sequence[TaskTime], timeline: Timeline, calibration: Calibration
) -> tuple[float, float]:
    """Return the 80 % interval of a step, in us, log-normal around the modelled time.

    Errors of one class are common to all its kernels, those of classes are independent; the further
    spread of whole steps (`log_sd`) is added, and the sum scaled by `interval_scale`, so that the
    interval covers 80 % of the published steps of families that were held out of the fit.
    """
    spread = math.hypot(class_spread(graph, times, timeline, calibration), calibration.log_sd)
    factor = math.exp(NORMAL_90 * spread * calibration.interval_scale)
    return timeline.step_us / factor, timeline.step_us * factor


def class_spread(
    graph: TaskGraph, times: Sequence[TaskTime], timeline: Timeline, calibration: Calibration
) -> float:
    """Return the standard deviation of the log of a step, from its classes' spreads."""
    spent: dict[str, float] = defaultdict(float)
    for task, time in zip(graph.tasks, times, strict=True):
        if task.engine in ("cube", "vector"):
            spent[task.cost_class] += time.us * task.repeat
    classes = calibration.efficiency.classes
    squares = sum((us * classes[name].log_sd) ** 2 for name, us in spent.items())
    return math.sqrt(squares) / timeline.step_us if timeline.step_us else 0.0
