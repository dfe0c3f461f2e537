"""Telemetry of a sink: the records and outcomes of its steps."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING, Any, NamedTuple

import numpy as np

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import TrainState

NON_FINITE_STEPS = "non_finite_steps"
"""Name of the part of a state that counts non-finite steps."""
PLACES = ("step", "epoch", "sink")
"""Keys of metrics.jsonl that locate a step in the run; all other keys are metrics."""


@dataclass(frozen=True)
class Telemetry:
    """Records of the steps start + 1, ..., start + n, counted from 1.

    `columns` are arrays (n,) by name, float32, or bool for flags. Monitors write a flag only for
    the steps for which it is True.
    """

    start: int
    columns: Mapping[str, np.ndarray]

    @staticmethod
    def from_rows(
        start: int, rows: np.ndarray, names: Sequence[str], flags: Collection[str] = ()
    ) -> Telemetry:
        """Make telemetry from rows of the device's buffer, (steps, columns). The columns in `flags`
        become bool. Raises ValueError if names and columns differ in number."""
        columns = dict(zip(names, np.asarray(rows, np.float32).T, strict=True))
        for name in columns.keys() & flags:
            columns[name] = columns[name] > 0
        return Telemetry(start, columns)

    def __len__(self) -> int:
        return len(next(iter(self.columns.values())))

    @property
    def steps(self) -> np.ndarray:
        """The steps, counted from 1, int64 (steps,)."""
        return np.arange(self.start + 1, self.start + len(self) + 1)

    @property
    def loss(self) -> np.ndarray:
        return self.columns["loss"]

    @property
    def learning_rate(self) -> np.ndarray:
        return self.columns["learning_rate"]

    @property
    def grad_norm(self) -> np.ndarray:
        return self.columns["grad_norm"]

    @property
    def loss_scale(self) -> np.ndarray:
        return self.columns["loss_scale"]

    def take_first(self, steps: int) -> Telemetry:
        columns = {name: column[:steps] for name, column in self.columns.items()}
        return Telemetry(self.start, columns)

    def join(self, later: Telemetry) -> Telemetry:
        """Return these steps, followed by `later`."""
        return Telemetry(self.start, concatenate_columns((self, later)))

    @property
    def nbytes(self) -> int:
        return sum(column.nbytes for column in self.columns.values())

    def classify_steps(self, *, skips_overflow: bool = True) -> StepOutcome:
        """Return the outcome of each step, masks (steps,). `skips_overflow` is whether the loss
        scale skips overflows; if not, all skipped steps are `skipped_non_finite`."""
        zeros = np.zeros(len(self), np.float32)
        names = ("loss", "grad_norm", "skipped")
        loss, grad_norm, skipped = (self.columns.get(name, zeros) for name in names)
        return StepOutcome.from_columns(np, loss, grad_norm, skipped, skips_overflow=skips_overflow)

    @cached_property
    def non_finite_step(self) -> int | None:
        """The step that ended training, counted from 1; None if every step was applied or
        skipped."""
        should_continue = self.classify_steps().should_continue
        if should_continue.all():
            return None
        return self.start + int(should_continue.argmin()) + 1


def concatenate_columns(parts: Sequence[Telemetry]) -> dict[str, np.ndarray]:
    """Return the columns of all parts, joined by name. All parts must have the same names."""
    names = parts[0].columns
    return {name: np.concatenate([part.columns[name] for part in parts]) for name in names}


class StepOutcome(NamedTuple):
    """Outcome of steps as bool masks, () or (steps,), of numpy or jax. At most one is true for a
    step. If none is, the step is non-finite and ends the run."""

    applied: Any
    """The update was applied: loss and gradient are finite."""
    overflow: Any
    """The loss scale skipped the update: the loss is finite, the gradient isn't."""
    skipped_non_finite: Any
    """`on_nan: skip` skipped the update: the step is non-finite, and not an overflow."""

    @property
    def skipped(self) -> Any:
        """Whether the update was skipped and training continues."""
        return self.overflow | self.skipped_non_finite

    @property
    def should_continue(self) -> Any:
        return self.applied | self.skipped

    @staticmethod
    def from_columns(
        xp: Any, loss: Any, grad_norm: Any, skipped: Any, *, skips_overflow: bool = True
    ) -> StepOutcome:
        """Return the outcome of steps from columns of their records; `xp` is numpy or jax.numpy.
        If `skips_overflow`, a skipped step with a finite loss is an overflow, also one that the
        loss scale has left to `on_nan` after too many of them."""
        applied = xp.isfinite(loss) & xp.isfinite(grad_norm)
        was_skipped = xp.asarray(skipped) > 0
        overflow = was_skipped & (xp.isfinite(loss) if skips_overflow else False)
        return StepOutcome(applied, overflow, was_skipped & ~overflow)


def count_updates(state: TrainState) -> Array:
    """Return the number of applied updates, int32 (), which selects the learning rate."""
    updates = state.step
    for part in state.features.values():
        left_out = getattr(part, "left_out", None)
        if left_out is not None:
            updates = updates - left_out
    return updates


def count_skipped(state: TrainState) -> int:
    """Return the number of steps whose updates were skipped by `on_nan`, or undone by a
    rollback."""
    counts = state.features.get(NON_FINITE_STEPS)
    return 0 if counts is None else int(counts.left_out)
