"""Policies for non-finite steps, whose loss or gradient isn't finite, except overflows."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import PositiveInt

from pipeline.core.registry import ComponentOf, Spec, component
from pipeline.training.step_feature import StepFeature
from pipeline.training.telemetry import NON_FINITE_STEPS

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import TrainState
    from pipeline.training.telemetry import StepOutcome


class NonFinitePolicy(Spec):
    """The policy for non-finite steps: the component of kind "on_nan"."""

    counts_steps: ClassVar[bool] = False
    """Whether the training state counts non-finite steps, whose updates are left out."""
    name: str

    @property
    def skips_in_a_row(self) -> int:
        """The number of consecutive non-finite steps that the device skips before the loop ends."""
        return 0


@component("on_nan")
class Stop(NonFinitePolicy):
    """The run ends. The state before the step is saved, and the step is examined (autopsy)."""

    name: Literal["stop"] = "stop"


@component("on_nan")
class Skip(NonFinitePolicy):
    """The update is skipped, on the device, and training continues with the next batch. At most
    `most_in_a_row` consecutive non-finite steps are skipped; the next one ends the run."""

    counts_steps: ClassVar[bool] = True
    name: Literal["skip"] = "skip"
    most_in_a_row: PositiveInt = 10

    @property
    def skips_in_a_row(self) -> int:
        return self.most_in_a_row


@component("on_nan")
class Rollback(NonFinitePolicy):
    """The state goes back to a checkpoint, and training continues with the next batch.

    The updates since the checkpoint are lost, as in Chowdhery et al. (2022), sec. 5.1. A run rolls
    back at most `most` times; the next non-finite step ends the run.
    """

    counts_steps: ClassVar[bool] = True
    name: Literal["rollback"] = "rollback"
    most: PositiveInt = 3


STOP = Stop()
OnNan = Annotated[NonFinitePolicy, ComponentOf("on_nan")]


class NonFiniteStepCounts(NamedTuple):
    """Counts of non-finite steps, int32 scalars. Checkpoints have these names."""

    in_a_row: Array
    """Consecutive non-finite steps up to now."""
    left_out: Array
    """Steps of the run whose updates were skipped, or undone by a rollback."""


@dataclass(frozen=True)
class NonFiniteSteps(StepFeature):
    """The counts of non-finite steps, and the skipping of their updates."""

    name: ClassVar[str] = NON_FINITE_STEPS
    policy: NonFinitePolicy

    def init(self, trained: Any) -> NonFiniteStepCounts:
        import jax.numpy as jnp

        zero = jnp.zeros((), jnp.int32)
        return NonFiniteStepCounts(zero, zero)

    def decide(
        self, state: TrainState, outcome: StepOutcome, loss: Array, grad_norm: Array
    ) -> StepOutcome:
        """Return the outcome with the steps that are skipped though they aren't overflows."""
        if not self.policy.skips_in_a_row:
            return outcome
        can_skip = state.features[NON_FINITE_STEPS].in_a_row < self.policy.skips_in_a_row
        skipped = ~(outcome.applied | outcome.overflow) & can_skip
        return outcome._replace(skipped_non_finite=skipped)

    def change_step(self, state: TrainState, outcome: StepOutcome) -> TrainState:
        """Return the state with a skipped step counted. An applied step sets the number of
        consecutive non-finite steps to 0; an overflow doesn't change it."""
        if not self.policy.skips_in_a_row:
            return state
        import jax.numpy as jnp

        before = state.features[NON_FINITE_STEPS]
        skipped = outcome.skipped_non_finite
        in_a_row = jnp.where(outcome.applied, 0, before.in_a_row + skipped)
        counts = NonFiniteStepCounts(in_a_row, before.left_out + skipped)
        return replace(state, step=state.step + skipped).replace_part(NON_FINITE_STEPS, counts)
