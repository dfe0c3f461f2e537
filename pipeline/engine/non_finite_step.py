"""A non-finite step that ends a run: its likely cause, and the change that a new run needs."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from pipeline.core.errors import RunError
from pipeline.training.telemetry import Telemetry

RECENT_STEPS = 20
"""Number of newest steps that are searched for an explosion."""
GROWTH = 100.0
"""Least factor by which an exploded loss or gradient norm has risen; batches differ by less."""
LEAST_LOSS = 10.0
LEAST_NORM = 1e3
LEAST_WEIGHT = 1e3
"""Least magnitudes that have exploded, since smaller ones may vary by any factor."""


class NonFiniteStepError(RunError):
    """A step whose loss or gradient isn't finite ends the run.

    `advice` names the change that a new run needs; it is empty if resuming the run may help.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


@dataclass(frozen=True)
class Examination:
    """The result of computing a non-finite step again."""

    repeats: bool = True
    """Whether the step is non-finite again."""
    is_in_data: bool = False
    """Whether a value of the dataset isn't finite."""
    largest_weight: float = 0.0
    """Greatest magnitude in the parameters before the step."""


class RecentSteps:
    """The loss, gradient norm and learning rate of the newest finite steps of this process."""

    def __init__(self) -> None:
        self._parts: deque[np.ndarray] = deque(maxlen=RECENT_STEPS)

    def add(self, telemetry: Telemetry) -> None:
        """Add the steps of `telemetry`."""
        columns = (telemetry.loss, telemetry.grad_norm, telemetry.learning_rate)
        rows = np.stack([np.asarray(column[-RECENT_STEPS:], np.float64) for column in columns], 1)
        last = telemetry.start + len(telemetry)
        steps = np.arange(last - len(rows) + 1, last + 1, dtype=np.float64)[:, None]
        self._parts.append(np.concatenate([steps, rows], 1))

    def explain(self, examined: Examination) -> str:
        """Return a text that blames the learning rate if the newest steps exploded, else ""."""
        rows = np.concatenate([np.empty((0, 4)), *self._parts])
        finite_rows = rows[np.isfinite(rows).all(1)]
        steps, losses, norms, rates = finite_rows[-RECENT_STEPS:].T
        if examined.is_in_data or not len(steps) or rates[-1] == 0:
            return ""
        symptom = (
            _describe_rise("the loss", steps, losses, LEAST_LOSS)
            or _describe_rise("the gradient norm", steps, norms, LEAST_NORM)
            or _describe_large_weight(steps, examined.largest_weight)
        )
        if not symptom:
            return ""
        return (
            f"{symptom}; the learning rate of step {int(steps[-1])} is {rates[-1]:g}, which is the "
            "likely cause: try a smaller train.optimizer.lr"
        )


def _describe_rise(name: str, steps: np.ndarray, values: np.ndarray, least: float) -> str:
    """Return a text about a rise to at least `least` by the factor `GROWTH`; "" without one."""
    end = len(values) - 1 - int(values[::-1].argmax())  # The last of equal maxima.
    start = int(values[: end + 1].argmin())
    if values[end] < max(least, GROWTH * values[start]):
        return ""
    num_steps = int(steps[end] - steps[start])
    return (
        f"{name} rose from {values[start]:.4g} to {values[end]:.4g} within {num_steps} "
        f"{'step' if num_steps == 1 else 'steps'}"
    )


def _describe_large_weight(steps: np.ndarray, largest: float) -> str:
    """Return a text if a weight is large after the first steps of a run, else ""."""
    num_steps = int(steps[-1])
    if int(steps[0]) > 1 or largest < LEAST_WEIGHT:
        return ""
    unit = "step" if num_steps == 1 else "steps"
    return f"after {num_steps} {unit} a weight has reached {largest:.4g}"


def advise(examined: Examination, cause: str, step: int, policy: str) -> str:
    """Return a text about the change that a new run needs; "" if the step may not fail again."""
    if not examined.repeats:
        return ""
    if cause:
        change = "a smaller train.optimizer.lr"
    elif examined.is_in_data:
        change = "corrected data"
    else:
        change = "another train.optimizer.lr or train.precision"
    skip = ", or train.on_nan=skip" if policy == "stop" and not cause else ""
    return f"would fail at step {step} again; start a new run with {change}{skip}"
