"""Telemetry of a sink: the record of every step that ran, not only of the last."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from pipeline.training.state import StepOutcome

COLUMNS = ("loss", "learning_rate", "grad_norm", "loss_scale", "skipped")


@dataclass(frozen=True)
class Telemetry:
    """Steps `start + 1 .. start + len`, as float32 arrays of equal length, from device to host."""

    start: int
    loss: np.ndarray
    learning_rate: np.ndarray
    grad_norm: np.ndarray
    loss_scale: np.ndarray
    skipped: np.ndarray

    @staticmethod
    def from_rows(start: int, rows: np.ndarray) -> Telemetry:
        """Make it of rows of the device's buffer, float32 (steps, 5), the columns of `Record`."""
        loss, learning_rate, grad_norm, loss_scale, skipped = np.asarray(rows, np.float32).T
        return Telemetry(start, loss, learning_rate, grad_norm, loss_scale, skipped)

    def __len__(self) -> int:
        return len(self.loss)

    def head(self, steps: int) -> Telemetry:
        """The first `steps` steps."""
        return Telemetry(self.start, *(getattr(self, name)[:steps] for name in COLUMNS))

    @property
    def nbytes(self) -> int:
        """Bytes of all columns."""
        return sum(getattr(self, name).nbytes for name in COLUMNS)

    def outcome(self, *, skips_overflow: bool = True) -> StepOutcome:
        """The outcome of each step, masks (steps,); whether the loss scale skips overflows tells
        the two kinds of skipped steps apart."""
        # Here, so that what only names this type starts without jax.
        from pipeline.training.state import StepOutcome

        return StepOutcome.from_columns(
            np, self.loss, self.grad_norm, self.skipped, skips_overflow=skips_overflow
        )

    @property
    def finite(self) -> np.ndarray:
        """Whether loss and gradient norm are finite, bool (steps,)."""
        return self.outcome().applied

    @cached_property
    def bad_step(self) -> int | None:
        """The first step, counted from 1, that was neither finite nor skipped; training stopped
        there. None without one."""
        good = self.outcome().should_continue
        first = int(good.argmin())
        return None if good[first] else self.start + first + 1


def stacked(parts: Sequence[Telemetry]) -> tuple[np.ndarray, np.ndarray]:
    """Join parts: their steps, int64 (n,), and their records, float32 (n, 5), in order."""
    steps = [np.arange(part.start + 1, part.start + len(part) + 1) for part in parts]
    columns = [np.concatenate([getattr(part, name) for part in parts]) for name in COLUMNS]
    return np.concatenate(steps), np.stack(columns, axis=1)
