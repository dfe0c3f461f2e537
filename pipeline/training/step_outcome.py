"""Outcome of steps: applied, skipped, or the end of the run, of numpy or jax; their counts."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import TrainState


class StepOutcome(NamedTuple):
    """Outcome of steps as bool masks, () or (steps,), of numpy or jax.

    At most one holds for a step; if none does, the step is bad and ends the run.
    """

    applied: Any
    """Loss and gradient are finite, so the update was applied."""
    overflow: Any
    """The update was skipped by the loss scale: the loss is finite, the gradient is not."""
    skipped_bad: Any
    """The step is bad, no overflow, and its update was skipped by `on_nan: skip`."""

    @property
    def skipped(self) -> Any:
        """Whether there was no update, and training continues."""
        return self.overflow | self.skipped_bad

    @property
    def should_continue(self) -> Any:
        """Whether training continues after the step."""
        return self.applied | self.skipped

    @staticmethod
    def from_columns(
        xp: Any, loss: Any, grad_norm: Any, skipped: Any, *, skips_overflow: bool = True
    ) -> StepOutcome:
        """Read the outcome back from columns of `Record`; `xp` is numpy or jax.numpy.

        `skips_overflow` is whether the loss scale skips overflows.
        """
        applied = xp.isfinite(loss) & xp.isfinite(grad_norm)
        was_skipped = xp.asarray(skipped) > 0
        overflow = was_skipped & (xp.isfinite(loss) if skips_overflow else False)
        return StepOutcome(applied, overflow, was_skipped & ~overflow)


def updates_so_far(state: TrainState) -> Array:
    """The number of updates applied, int32 (), which selects the learning rate."""
    updates = state.step
    if state.overflows is not None:
        updates = updates - state.overflows.skipped_steps
    if state.bad_steps is not None:
        updates = updates - state.bad_steps.left_out
    return updates


def num_skipped(state: TrainState) -> int:
    """The number of steps without an update because of a bad step."""
    return 0 if state.bad_steps is None else int(state.bad_steps.left_out)
