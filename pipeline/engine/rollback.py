"""Rollback: at a non-finite step the state goes back to a checkpoint, and the data do not.

Training continues with the batch after the non-finite one, from weights that have seen neither it
nor the batches since the checkpoint. Steps keep their numbers, and the learning rate follows the
number of updates that remain. Only checkpoints at steps that the recipe names are used
(`checkpoint.every_steps`, `every_passes`, and the start). A checkpoint that a signal or a clock has
saved is not, so that a resumed run goes back to the same step as an unbroken one. None is used
twice: if training diverges again from the same weights, an older checkpoint is taken.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.core.errors import DataError, RunError
from pipeline.engine.schedule import is_due

if TYPE_CHECKING:
    from pipeline.training.state import TrainState

ROLLBACKS = "rollbacks"
"""Key of a checkpoint for the rollbacks before it."""


@dataclass(frozen=True)
class RollbackRecord:
    """A rollback: the updates after boundary `to` up to the non-finite step `step` were undone."""

    step: int
    to: int


class NoRollbacks:
    """A run that doesn't go back: a non-finite step ends it, if the device doesn't skip it."""

    needs_start = False
    """Whether the state before the first step is saved, to go back to."""
    done: Sequence[RollbackRecord] = ()

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint: nothing."""
        return {}

    def go_back(self, step: int, state: TrainState) -> TrainState | None:
        """Return the state to continue with after `step`; None if the run ends."""
        return None


@dataclass
class Rollbacks(NoRollbacks):
    """The rollbacks of a run, and the checkpoints that it can go back to.

    `steps` lists the steps of the complete checkpoints; `read` returns the state of one of them in
    the structure of a state.
    """

    needs_start = True
    most: int
    """How often a run may go back."""
    periods: Sequence[int]
    """A checkpoint is due at the multiples of each."""
    steps: Callable[[], Sequence[int]]
    read: Callable[[int, TrainState], TrainState]
    done: list[RollbackRecord] = field(default_factory=list)

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Restore the rollbacks of a checkpoint, pairs (non-finite step, boundary)."""
        self.done = [RollbackRecord(step, to) for step, to in rollbacks]

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, as JSON."""
        return {ROLLBACKS: [[past.step, past.to] for past in self.done]}

    def go_back(self, step: int, state: TrainState) -> TrainState:
        """Return the state to continue with after `step`, on the host.

        `state`, from before that step, has the structure. Raises RunError with the reason if there
        is nothing to go back to.
        """
        if len(self.done) == self.most:
            raise RunError(f"train.on_nan: went back {self.most} times already, as often as it may")
        used = {past.to for past in self.done}
        for boundary in sorted(self.steps(), reverse=True):
            if boundary >= step or boundary in used or not is_due(boundary, self.periods):
                continue
            try:
                restored = self.read(boundary, state)
            except DataError:
                continue  # damaged: there may be an older one
            if _is_finite(restored):
                self.done.append(RollbackRecord(step, boundary))
                return _as_of(restored, step)
        raise RunError("train.on_nan: there is no checkpoint left to go back to")


def _is_finite(state: TrainState) -> bool:
    """Whether weights are finite: an update may have spoilt them before a loss showed it."""
    trained = state.params, state.batch_stats, state.opt_state
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained)]
    return all(
        np.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _as_of(state: TrainState, step: int) -> TrainState:
    """Return the state as of `step`; the steps since it was saved count as skipped."""
    counts = state.bad_steps
    assert counts is not None, "counted under this policy"
    skipped = jnp.int32(counts.left_out + step - state.step)
    return replace(
        state,
        step=jnp.int32(step),
        bad_steps=replace(counts, in_a_row=jnp.int32(0), left_out=skipped),
    )
