"""Rollback: after a non-finite step the state goes back to a checkpoint, and the data continues.

Training continues with the batch after the non-finite step, and steps keep their numbers. The
learning rate depends on the number of updates in the state, so it goes back too. Only checkpoints
at the recipe's steps are used (`checkpoint.every_steps`, `every_epochs`, and the start), not those
that a signal or the time caused, so that a resumed run goes back to the same step as an
uninterrupted one. If training diverges again, an older checkpoint is used.
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
from pipeline.training.telemetry import NON_FINITE_STEPS

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
    """Rollbacks so far, in order."""

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Do nothing."""

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores: nothing."""
        return {}

    def go_back(self, step: int, state: TrainState) -> TrainState | None:
        """Return the state to continue with after `step`; None if the run ends."""
        return None


@dataclass
class Rollbacks(NoRollbacks):
    """The rollbacks of a run, and the checkpoints that it can go back to.

    The first of several processes chooses the checkpoint; all read it.
    """

    needs_start = True
    most: int
    """Largest number of rollbacks of a run."""
    periods: Sequence[int]
    """Periods of the recipe's checkpoints, in steps."""
    steps: Callable[[], Sequence[int]]
    """Lists the steps of the complete checkpoints."""
    read: Callable[[int, TrainState], TrainState]
    """Reads the checkpoint of a step in the structure of a state. Raises DataError."""
    agree: Agree = decide_alone
    done: list[RollbackRecord] = field(default_factory=list)

    def remember(self, rollbacks: Iterable[tuple[int, int]]) -> None:
        """Restore the rollbacks of a checkpoint, pairs (non-finite step, boundary)."""
        self.done = [RollbackRecord(step, to) for step, to in rollbacks]

    def state(self) -> dict[str, Any]:
        """Return what a checkpoint stores, as JSON."""
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
        """Return the newest unused checkpoint's step before `step` with finite weights, or None."""
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
    """Return whether all weights of a state are finite. With a finite loss, some may not be."""
    trained = state.variables, state.opt_state
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(trained)]
    return all(
        np.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _advance_to(state: TrainState, step: int) -> TrainState:
    """Return the state with `step` as its step; `left_out` grows by the steps in between."""
    before = state.features[NON_FINITE_STEPS]
    left_out = jnp.int32(before.left_out + step - state.step)
    counts = before._replace(in_a_row=jnp.int32(0), left_out=left_out)
    return replace(state, step=jnp.int32(step)).replace_part(NON_FINITE_STEPS, counts)
