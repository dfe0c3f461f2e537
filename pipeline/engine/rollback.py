"""Rollback: after a non-finite step the state goes back to a checkpoint, and the data continues.

The batches since the checkpoint are skipped: training continues with the batch after the non-finite
one. Steps keep their numbers, and the learning rate follows the number of remaining updates. Only
checkpoints at the recipe's steps are used (`checkpoint.every_steps`, `every_passes`, and the
start), and none that a signal or a clock has caused, so that a resumed run goes back to the same
step as an uninterrupted one. If training diverges again, an older checkpoint is used.
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
from pipeline.training.parallel.ranks import Agree, decide_alone

if TYPE_CHECKING:
    from pipeline.training.state import TrainState

ROLLBACKS = "rollbacks"
"""Key in a checkpoint for the rollbacks before it."""


@dataclass(frozen=True)
class RollbackRecord:
    """A rollback: the updates after boundary `to` up to the non-finite step `step` were undone."""

    step: int
    to: int


class NoRollbacks:
    """The rollbacks of a run that doesn't go back: a non-finite step is skipped or ends it."""

    needs_start = False
    """Whether the state before the first step must be saved."""
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
    the structure of a state. The first of several processes chooses the checkpoint; all read it.
    """

    needs_start = True
    most: int
    """A run rolls back at most this often."""
    periods: Sequence[int]
    """Periods of checkpoints, in steps."""
    steps: Callable[[], Sequence[int]]
    read: Callable[[int, TrainState], TrainState]
    agree: Agree = decide_alone
    done: list[RollbackRecord] = field(default_factory=list)

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Restore the rollbacks of a checkpoint, pairs (non-finite step, boundary)."""
        self.done = [RollbackRecord(step, to) for step, to in rollbacks]

    def state(self) -> dict[str, Any]:
        """Return the content of a checkpoint, as JSON."""
        return {ROLLBACKS: [[rollback.step, rollback.to] for rollback in self.done]}

    def go_back(self, step: int, state: TrainState) -> TrainState:
        """Return the state to continue with after `step`, on the host.

        `state` is the state before `step`, whose structure is restored. Raises RunError with the
        reason if the run can't go back.
        """
        if len(self.done) == self.most:
            raise RunError(f"train.on_nan: went back {self.most} times already, as often as it may")
        boundary = self.agree(lambda: self._find_boundary(step, state))
        if boundary is None:
            raise RunError("train.on_nan: there is no checkpoint left to go back to")
        self.done.append(RollbackRecord(step, boundary))
        return _advance_to(self.read(boundary, state), step)

    def _find_boundary(self, step: int, state: TrainState) -> int | None:
        """Return the newest unused boundary before `step` with finite weights; None without any."""
        used = {rollback.to for rollback in self.done}
        for boundary in sorted(self.steps(), reverse=True):
            if boundary >= step or boundary in used or not is_due(boundary, self.periods):
                continue
            try:
                if _is_finite(self.read(boundary, state)):
                    return boundary
            except DataError:
                continue  # The checkpoint is damaged: an older one may be readable.
        return None


def _is_finite(state: TrainState) -> bool:
    """Return whether weights are finite; in a checkpoint with a finite loss they may not be."""
    trained = state.params, state.batch_stats, state.opt_state
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained)]
    return all(
        np.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _advance_to(state: TrainState, step: int) -> TrainState:
    """Return the state with another `step`; the steps in between count as skipped."""
    counts = state.bad_steps
    assert counts is not None, "counted under this policy"
    skipped = jnp.int32(counts.left_out + step - state.step)
    return replace(
        state,
        step=jnp.int32(step),
        bad_steps=replace(counts, in_a_row=jnp.int32(0), left_out=skipped),
    )
