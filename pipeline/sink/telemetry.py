"""What a sink brings back: the record of every step that ran, not only of the last."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np


@dataclass(frozen=True)
class Telemetry:
    """Steps `start + 1 .. start + len`, as float32 arrays of equal length, from device to host."""

    start: int
    loss: np.ndarray
    learning_rate: np.ndarray
    grad_norm: np.ndarray
    loss_scale: np.ndarray

    @staticmethod
    def from_rows(start: int, rows: np.ndarray) -> Telemetry:
        """From the rows (steps, 4) of the device's buffer, whose columns are `Record`'s."""
        loss, learning_rate, grad_norm, loss_scale = np.asarray(rows, np.float32).T
        return Telemetry(start, loss, learning_rate, grad_norm, loss_scale)

    def __len__(self) -> int:
        return len(self.loss)

    @property
    def finite(self) -> np.ndarray:
        """Per step: were the loss and the gradient numbers? bool (steps,)."""
        return np.isfinite(self.loss) & np.isfinite(self.grad_norm)

    @property
    def bad_step(self) -> int | None:
        """The first step, counted from 1, that was not finite; training stopped there."""
        bad = np.flatnonzero(~self.finite)
        return self.start + int(bad[0]) + 1 if bad.size else None
