"""Rollback: at a bad step the state goes back to a checkpoint, and the data do not.

Training goes on with the batch behind the bad one, from weights that have seen neither it nor the
batches since the checkpoint; steps keep their numbers, and the schedule goes by updates that count.
Only checkpoints at steps that the recipe names are gone back to (`checkpoint.every_steps`,
`every_passes`, and the start): where a signal or a clock has saved one too changes nothing, so that
a resumed run goes back where an unbroken one does. None is gone back to twice: weights from which
training has diverged once more are left for older ones.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from pipeline.errors import DataError, RunError
from pipeline.sink.schedule import is_due
from pipeline.training.bad_steps import Rollback
from pipeline.training.state import BadStepCounts, TrainState

KEPT = "rollbacks"
"""Where a checkpoint keeps those that were made before it."""


@dataclass(frozen=True)
class GoneBack:
    """The updates of the steps behind boundary `to` up to the bad step `step` were undone."""

    step: int
    to: int


@dataclass
class Rollbacks:
    """Where a run can go back to, and how often it has.

    `steps` gives those of the complete checkpoints there are, `read` the state of one of them in
    the structure of the state it is given.
    """

    policy: Rollback
    periods: Sequence[int]
    """A checkpoint is due at the multiples of each."""
    steps: Callable[[], Sequence[int]]
    read: Callable[[int, TrainState], TrainState]
    done: list[GoneBack] = field(default_factory=list)

    def remember(self, kept: Iterable[tuple[int, int]]) -> None:
        """Go on with the rollbacks that a checkpoint kept."""
        self.done = [GoneBack(step, to) for step, to in kept]

    def kept(self) -> dict[str, Any]:
        """What a checkpoint keeps, as JSON."""
        return {KEPT: [[gone.step, gone.to] for gone in self.done]}

    def go_back(self, bad: int, state: TrainState) -> TrainState:
        """The state behind step `bad`, on the host; `state` is the one before it.

        Raises RunError that says why there is nothing to go back to.
        """
        if len(self.done) == self.policy.most:
            raise RunError(
                f"train.on_nan: went back {self.policy.most} times already, as often as it may"
            )
        for step in sorted(self._candidates(bad), reverse=True):
            try:
                found = self.read(step, state)
            except DataError:
                continue  # damaged: there may be an older one
            if _is_finite(found):
                self.done.append(GoneBack(bad, step))
                return _without(found, bad)
        raise RunError("train.on_nan: there is no checkpoint left to go back to")

    def _candidates(self, bad: int) -> list[int]:
        used = {gone.to for gone in self.done}
        return [
            step
            for step in self.steps()
            if step < bad and step not in used and is_due(step, self.periods)
        ]


def _is_finite(state: TrainState) -> bool:
    """Weights that an update has spoilt may have been saved before a step could tell."""
    kept = state.params, state.batch_stats, state.opt_state
    leaves = [np.asarray(leaf) for leaf in jax.tree.leaves(kept)]
    return all(
        np.isfinite(leaf).all() for leaf in leaves if jnp.issubdtype(leaf.dtype, jnp.floating)
    )


def _without(state: TrainState, bad: int) -> TrainState:
    """The state as that behind step `bad`, the updates since it was saved left out."""
    counts = state.bad_steps
    assert counts is not None, "counted under this policy"
    left_out = jnp.int32(counts.left_out + bad - state.step)
    return replace(state, step=jnp.int32(bad), bad_steps=BadStepCounts(jnp.int32(0), left_out))
