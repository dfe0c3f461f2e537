"""Counts of the steps of a state."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import TrainState


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
