"""A non-finite step that ends a run: its likely cause, and what to change before the next run."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass

import numpy as np

from pipeline.core.errors import RunError
from pipeline.training.telemetry import Telemetry

WINDOW_STEPS = 20
"""Newest steps among which an explosion is looked for."""
GROWTH = 100.0
"""Factor by which a loss or gradient norm explodes; from batch to batch they vary by less."""
LEAST_LOSS = 10.0
LEAST_NORM = 1e3
LEAST_WEIGHT = 1e3
"""Magnitudes below which nothing has exploded: small losses vary by any factor."""


class NonFiniteStepError(RunError):
    """A step whose loss or gradient is not finite ends the run.

    `advice` is what to change if the same run would fail again; empty if resuming may help.
    """

    def __init__(self, message: str, advice: str) -> None:
        super().__init__(message)
        self.advice = advice


@dataclass(frozen=True)
class Examined:
    """The outcome of the examination of a non-finite step."""

    repeats: bool = True
    """Whether the step is non-finite a second time."""
    in_data: bool = False
    """Whether a value of the dataset is not finite."""
    largest_weight: float = 0.0
    """The greatest magnitude in the parameters before the step."""


class RecentSteps:
    """The loss, gradient norm and learning rate of the newest finite steps of this process."""

    def __init__(self) -> None:
        self._parts: deque[np.ndarray] = deque(maxlen=WINDOW_STEPS)

    def add(self, telemetry: Telemetry) -> None:
        """Add steps."""
        columns = (telemetry.loss, telemetry.grad_norm, telemetry.learning_rate)
        rows = np.stack([np.asarray(column[-WINDOW_STEPS:], np.float64) for column in columns], 1)
        last = telemetry.start + len(telemetry)
        steps = np.arange(last - len(rows) + 1, last + 1, dtype=np.float64)[:, None]
        self._parts.append(np.concatenate([steps, rows], 1))

    def explain(self, examined: Examined) -> str:
        """Name the learning rate if the newest steps have exploded; "" if nothing suggests it."""
        rows = np.concatenate([np.empty((0, 4)), *self._parts])
        rows = rows[np.isfinite(rows).all(1)][-WINDOW_STEPS:]
        if examined.in_data or not len(rows) or rows[-1, 3] == 0:
            return ""
        symptom = (
            _rise("the loss", rows[:, 0], rows[:, 1], LEAST_LOSS)
            or _rise("the gradient norm", rows[:, 0], rows[:, 2], LEAST_NORM)
            or _growth_of_weights(rows[:, 0], examined.largest_weight)
        )
        if not symptom:
            return ""
        step = int(rows[-1, 0])
        rate = rows[-1, 3]
        return (
            f"{symptom}; the learning rate of step {step} is {rate:g}, which is the likely cause: "
            "try a smaller train.optimizer.lr"
        )


def _rise(name: str, steps: np.ndarray, values: np.ndarray, least: float) -> str:
    """Describe a rise by orders of magnitude up to the newest steps."""
    high = len(values) - 1 - int(values[::-1].argmax())
    low = int(values[: high + 1].argmin())
    if values[high] < max(least, GROWTH * values[low]):
        return ""
    within = int(steps[high] - steps[low])
    return (
        f"{name} rose from {values[low]:.4g} to {values[high]:.4g} within {within} "
        f"{'step' if within == 1 else 'steps'}"
    )


def _growth_of_weights(steps: np.ndarray, largest: float) -> str:
    """Describe weights that the first steps of a run have made huge."""
    done = int(steps[-1])
    if int(steps[0]) > 1 or largest < LEAST_WEIGHT:
        return ""
    return f"after {done} {'step' if done == 1 else 'steps'} a weight has reached {largest:.4g}"


def advise(examined: Examined, cause: str, step: int, policy: str) -> str:
    """Return what to change if a run would come to the same non-finite step; "" if it may not."""
    if not examined.repeats:
        return ""
    if cause:
        change = "a smaller train.optimizer.lr"
    elif examined.in_data:
        change = "corrected data"
    else:
        change = "another train.optimizer.lr or train.precision"
    skip = ", or train.on_nan=skip" if policy == "stop" and not cause else ""
    return f"would fail at step {step} again; start a new run with {change}{skip}"
