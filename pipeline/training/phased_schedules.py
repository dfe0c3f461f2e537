"""Learning-rate schedules of several phases: restarts, waves, a cooldown, one cycle."""

from __future__ import annotations

from typing import Annotated, Literal, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, NonNegativeInt, PositiveInt, model_validator

from pipeline.core.registry import component
from pipeline.training.component_specs import ScheduleSpec
from pipeline.training.schedules import DecaySpan, Share, WarmupDecay


@component("schedule")
class CosineRestarts(WarmupDecay):
    """Cosine decay that begins again after each period (SGDR, 1608.03983): at update t of a period
    of n, lr * (e + (1 - e) * (1 + cos(pi * t / n)) / 2) with e = end_factor. Each period is
    `growth` times the one before. PyTorch's CosineAnnealingWarmRestarts."""

    name: Literal["cosine_restarts"] = "cosine_restarts"
    period_steps: NonNegativeInt = 0
    period_epochs: NonNegativeFloat = 1.0
    """The first period in epochs, in place of `period_steps`; rounded to whole steps."""
    growth: PositiveInt = 1
    end_factor: Share = 0.0

    @model_validator(mode="after")
    def _require_one_length(self) -> Self:
        if bool(self.period_steps) == bool(self.period_epochs):
            raise ValueError(
                f"period_steps = {self.period_steps} and period_epochs = {self.period_epochs}: "
                "exactly one must be above 0"
            )
        return self

    def decay(self, span: DecaySpan) -> np.ndarray:
        length = self.period_steps or max(1, round(self.period_epochs * span.steps_per_epoch))
        waves = []
        num_left = span.stop - span.start
        while num_left > 0:
            steps = np.arange(min(length, num_left))
            waves.append(0.5 * (1 + np.cos(np.pi * steps / length)))
            num_left -= length
            length *= self.growth
        return self.end_factor + (1 - self.end_factor) * np.concatenate(waves)


@component("schedule")
class WarmupStableDecay(WarmupDecay):
    """The full learning rate after warmup, then a cooldown over the last updates (MiniCPM,
    2404.06395).

    The cooldown has round(cooldown_share * T) of the T updates. At the share s of it the rate is
    lr * (e + (1 - e) * (1 - s)) with e = end_factor. With `shape: sqrt`, 1 - s is 1 - sqrt(s), the
    best in 2405.18392. The rate is lr * e one update after the last.
    """

    name: Literal["warmup_stable_decay"] = "warmup_stable_decay"
    cooldown_share: Annotated[float, Field(gt=0, le=1)] = 0.2
    shape: Literal["linear", "sqrt"] = "sqrt"
    end_factor: Share = 0.0

    def decay(self, span: DecaySpan) -> np.ndarray:
        length = min(max(1, round(self.cooldown_share * span.stop)), span.stop - span.start)
        step = span.start + span.elapsed_updates
        share = np.maximum(step - (span.stop - length), 0) / length
        fall = np.sqrt(share) if self.shape == "sqrt" else share
        return self.end_factor + (1 - self.end_factor) * (1 - fall)


@component("schedule")
class OneCycle(ScheduleSpec):
    """One rise and one fall over the whole run (Smith & Topin, 1708.07120), as in PyTorch's
    OneCycleLR.

    With T updates, the rate is lr * start_factor at update 0, lr at update rise_share * T - 1, and
    lr * end_factor at update T - 1. In between it follows half a cosine, or a line.
    """

    name: Literal["one_cycle"] = "one_cycle"
    rise_share: Share = 0.3
    start_factor: Share = 0.04
    end_factor: Share = 4e-6
    shape: Literal["cosine", "linear"] = "cosine"

    def table(self, lr: float, steps: int, steps_per_epoch: int) -> np.ndarray:
        """Return the learning rate of each of `steps` updates, float32."""
        step = np.arange(steps)
        peak, last = self.rise_share * steps - 1, steps - 1
        rise = np.clip(step / peak, 0, 1) if peak > 0 else np.ones(steps)
        fall = np.clip((step - peak) / max(last - peak, 1), 0, 1)
        if self.shape == "cosine":
            rise, fall = (0.5 * (1 - np.cos(np.pi * share)) for share in (rise, fall))
        rising = self.start_factor + (1 - self.start_factor) * rise
        falling = 1 + (self.end_factor - 1) * fall
        factors = np.where(step <= peak, rising, falling)
        return (lr * factors).astype(np.float32)


@component("schedule")
class CosineLog(WarmupDecay):
    """lr * (1 - cos(2 pi log2(1 + (2^n - 1) s))) / 2 at the share s of the updates: n waves, each
    twice as long as the one before, from 0 to lr and back (RealMLP's coslog4, 2407.04491)."""

    name: Literal["cosine_log"] = "cosine_log"
    waves: PositiveInt = 4

    def decay(self, span: DecaySpan) -> np.ndarray:
        phase = np.log2(1 + (2.0**self.waves - 1) * span.progress)
        return 0.5 * (1 - np.cos(2 * np.pi * phase))
