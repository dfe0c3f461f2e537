"""Learning-rate schedules: linear warmup, then one of several decays.

Tables are computed in numpy float64 and rounded to float32 once, with relative errors up to 6e-8.
Over the 17,550 steps of 90 epochs of CIFAR-10, relative errors of optax's float32 schedules were up
to 7e-7 (exponential), 2e-4 (polynomial) and, at the end, 100 % (cosine).

In formulas t is the number of updates since the end of warmup, and D the number of updates after
warmup in the whole run.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass
from itertools import pairwise
from typing import Annotated, Literal, Self

import numpy as np
from pydantic import (
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveFloat,
    PositiveInt,
    model_validator,
)

from pipeline.core.registry import Seq, component
from pipeline.training.component_specs import ScheduleSpec

Share = Annotated[float, Field(ge=0, le=1)]


@dataclass(frozen=True)
class DecaySpan:
    """The updates after warmup: start, start + 1, ..., stop - 1, counted from 0."""

    start: int
    stop: int
    steps_per_epoch: int

    @property
    def elapsed_updates(self) -> np.ndarray:
        """The number of updates of the span before each update: 0, 1, 2, ..."""
        return np.arange(self.stop - self.start)

    @property
    def progress(self) -> np.ndarray:
        """The share of the span's updates that are before each update, in [0, 1)."""
        return self.elapsed_updates / (self.stop - self.start)


class WarmupDecay(ScheduleSpec):
    """Base of the schedules: lr * (i + 1) / W at update i of W in warmup, then lr * `decay`."""

    warmup_steps: NonNegativeInt = 0
    warmup_epochs: NonNegativeFloat = 0.0
    """The length of warmup in epochs, in place of `warmup_steps`."""

    def warmup(self, steps_per_epoch: int) -> int:
        """Return the length of warmup in steps. Raises ValueError if both units are set."""
        if self.warmup_steps and self.warmup_epochs:
            raise ValueError(
                f"warmup_steps = {self.warmup_steps} and warmup_epochs = {self.warmup_epochs}: "
                "set at most one"
            )
        return self.warmup_steps or round(self.warmup_epochs * steps_per_epoch)

    @abstractmethod
    def decay(self, span: DecaySpan) -> np.ndarray:
        """Return the factor on the learning rate at each update of the span, float64."""

    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the learning rate of each of `steps` updates, float32. If training ends within
        warmup, the table is the first part of the ramp. Raises ValueError if warmup is set in both
        units."""
        warmup = self.warmup(steps_per_epoch)
        factors = np.arange(1, min(warmup, steps) + 1) / float(max(warmup, 1))
        if warmup < steps:
            decay = self.decay(DecaySpan(warmup, steps, steps_per_epoch))
            factors = np.concatenate([factors, decay])
        return (lr * factors).astype(np.float32)


@component("schedule")
class ConstantSchedule(WarmupDecay):
    """The full learning rate after warmup."""

    name: Literal["constant"] = "constant"

    def decay(self, span: DecaySpan) -> np.ndarray:
        return np.ones_like(span.progress)


@component("schedule")
class Piecewise(WarmupDecay):
    """lr * factors[k] from step milestones[k] on. Steps are counted from the end of warmup. Each
    factor multiplies the full learning rate, not the rate before the milestone."""

    name: Literal["piecewise"] = "piecewise"
    milestones: Seq[PositiveInt]
    factors: Seq[PositiveFloat]

    @model_validator(mode="after")
    def _require_factors(self) -> Self:
        if not self.milestones or len(self.milestones) != len(self.factors):
            raise ValueError(
                f"{len(self.milestones)} milestones for {len(self.factors)} factors; "
                "must have at least one milestone and a factor for each"
            )
        if any(later <= earlier for earlier, later in pairwise(self.milestones)):
            raise ValueError(f"milestones = {list(self.milestones)}: must increase")
        return self

    def decay(self, span: DecaySpan) -> np.ndarray:
        num_reached = np.searchsorted(self.milestones, span.elapsed_updates, side="right")
        return np.array([1.0, *self.factors])[num_reached]


@component("schedule")
class Exponential(WarmupDecay):
    """lr * decay_rate^(t / n), where n is `decay_steps`, or the steps of `decay_epochs` epochs.
    Epochs are rounded to whole steps, at least one. `staircase` rounds t / n down."""

    name: Literal["exponential"] = "exponential"
    decay_rate: Annotated[float, Field(gt=0, le=1)] = 0.97
    decay_steps: NonNegativeInt = 0
    decay_epochs: NonNegativeFloat = 1.0
    staircase: bool = False

    @model_validator(mode="after")
    def _require_one_length(self) -> Self:
        if bool(self.decay_steps) == bool(self.decay_epochs):
            raise ValueError(
                f"decay_steps = {self.decay_steps} and decay_epochs = {self.decay_epochs}: "
                "exactly one must be above 0"
            )
        return self

    def decay(self, span: DecaySpan) -> np.ndarray:
        length = self.decay_steps or max(1, round(self.decay_epochs * span.steps_per_epoch))
        divide = np.floor_divide if self.staircase else np.divide
        return self.decay_rate ** divide(span.elapsed_updates, float(length))


@component("schedule")
class Polynomial(WarmupDecay):
    """lr * (e + (1 - e) * (1 - t / D)^power) with e = end_factor. The rate is lr * e at t = D, one
    update after the last."""

    name: Literal["polynomial"] = "polynomial"
    end_factor: Share = 0.0
    power: PositiveFloat = 1.0

    def decay(self, span: DecaySpan) -> np.ndarray:
        return self.end_factor + (1 - self.end_factor) * (1 - span.progress) ** self.power


@component("schedule")
class Cosine(WarmupDecay):
    """lr * (e + (1 - e) * (1 + cos(pi * t / D)) / 2) with e = end_factor (SGDR, 1608.03983)."""

    name: Literal["cosine"] = "cosine"
    end_factor: Share = 0.0

    def decay(self, span: DecaySpan) -> np.ndarray:
        wave = 0.5 * (1 + np.cos(np.pi * span.progress))
        return self.end_factor + (1 - self.end_factor) * wave


@component("schedule")
class LinearCosine(WarmupDecay):
    """Linear times cosine decay over 0.47 periods, as in the ResNet-50 of MindSpore's model zoo.

    With T steps, W of them warmup, and D = T - W, the rate of update i >= W is
    lr * ((T - i) / D * 0.5 * (1 + cos(2 pi * 0.47 * i / D)) + 1e-5).

    Since i is counted from the start of training, the cosine's argument can exceed pi. So after a
    warmup of more than about 6 % of the training, the learning rate rises a little near the end,
    and falls again. With `cosine` it doesn't.
    """

    name: Literal["linear_cosine"] = "linear_cosine"

    def decay(self, span: DecaySpan) -> np.ndarray:
        step = span.start + span.elapsed_updates
        length = span.stop - span.start
        linear = (span.stop - step) / length
        cosine = 0.5 * (1 + np.cos(np.pi * 2 * 0.47 * step / length))
        return linear * cosine + 1e-5
