"""Loss scales: factors on the loss, so that small gradients don't become 0 in float16.

An *overflow* is a step with a finite loss and non-finite gradients. Gradients are non-finite if the
norm of all scaled gradients, computed in float32, isn't finite. A norm above 1.8e19 is computed as
infinite, since its square overflows.
"""

from __future__ import annotations

from abc import abstractmethod
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, NamedTuple

from pydantic import BeforeValidator, Field, GetJsonSchemaHandler, PositiveInt
from pydantic.json_schema import JsonSchemaValue
from pydantic_core import CoreSchema

from pipeline.core.registry import MAX_FLOAT, ComponentOf, Spec, component
from pipeline.training.step_feature import StepFeature

if TYPE_CHECKING:
    from jax import Array

    from pipeline.models.layers.precision import Level
    from pipeline.training.state import TrainState
    from pipeline.training.telemetry import StepOutcome


MIN_SCALE = 2.0**-126
"""The least normal number in float32. Smaller scales are computed as 0."""


class LossScaleSpec(Spec):
    """A scale of the loss: the component of kind "loss_scale"."""

    name: str

    @abstractmethod
    def resolve(self, level: Level) -> LossScaling:
        """Return the loss scale to use at a level of precision."""


class LossScaling(LossScaleSpec):
    """Base of the loss scales that are the same for every level of precision."""

    def resolve(self, level: Level) -> LossScaling:
        return self

    @property
    @abstractmethod
    def initial(self) -> float:
        """The scale of the first step."""

    @property
    def skips_overflow(self) -> bool:
        """Whether an overflow skips its update and training continues."""
        return True

    def next(self, scale: Array, good_steps: Array, overflow: Array) -> tuple[Array, Array]:
        """Return the scale of the next step, float32 (), and the new `good_steps`, int32 ().
        `good_steps` is the number of steps since the last overflow or change of the scale, and
        `overflow`, bool (), is whether this step overflowed."""
        return scale, good_steps


@component("loss_scale")
class Auto(LossScaleSpec):
    """MindSpore's loss scale for the level of precision (`_config_level`): dynamic in O2, else
    1."""

    name: Literal["auto"] = "auto"

    def resolve(self, level: Level) -> LossScaling:
        return Dynamic() if level == "O2" else Fixed(scale=1.0, drop_overflow_update=False)


@component("loss_scale")
class Fixed(LossScaling):
    """MindSpore's FixedLossScaleManager, with its defaults.

    With `drop_overflow_update` an overflow skips the update and training continues. Without it, the
    run ends at once and the state before that step is saved. MindSpore instead applies the
    non-finite update, and the next loss is NaN.
    """

    name: Literal["fixed"] = "fixed"
    scale: Annotated[float, Field(ge=MIN_SCALE)] = 128.0
    drop_overflow_update: bool = True

    @property
    def initial(self) -> float:
        return self.scale

    @property
    def skips_overflow(self) -> bool:
        return self.drop_overflow_update


@component("loss_scale")
class Dynamic(LossScaling):
    """MindSpore's DynamicLossScaleManager, with its defaults.

    An overflow skips the update and divides the scale by `factor`, down to 1. After `window` steps
    without an overflow the scale is multiplied by `factor` (DynamicLossScaleUpdateCell,
    mindspore/nn/wrap/loss_scale.py).
    """

    name: Literal["dynamic"] = "dynamic"
    init: Annotated[float, Field(ge=1)] = 2.0**24
    factor: Annotated[float, Field(gt=1)] = 2.0
    window: PositiveInt = 2000

    @property
    def initial(self) -> float:
        return self.init

    def next(self, scale: Array, good_steps: Array, overflow: Array) -> tuple[Array, Array]:
        import jax.numpy as jnp

        factor = jnp.float32(self.factor)
        good_steps = jnp.where(overflow, 0, good_steps + 1)
        grows = good_steps == self.window
        lower = jnp.maximum(scale * (1 / factor), 1.0)  # MindSpore multiplies by the reciprocal.
        # An infinite scale would never fall again.
        higher = jnp.where(grows & jnp.isfinite(scale * factor), scale * factor, scale)
        scale = jnp.where(overflow, lower, higher)
        return scale, jnp.where(grows, 0, good_steps)


class _AllowNumber:
    """Lets the JSON schema of a loss scale be a number as well."""

    def __get_pydantic_json_schema__(
        self, schema: CoreSchema, handler: GetJsonSchemaHandler
    ) -> JsonSchemaValue:
        return {
            "anyOf": [
                {"type": "number", "minimum": MIN_SCALE, "maximum": MAX_FLOAT},
                handler(schema),
            ]
        }


def _convert_number(value: Any) -> Any:
    """Return a number as a fixed scale with `drop_overflow_update: false`, other values as they
    are."""
    if isinstance(value, int | float) and not isinstance(value, bool):
        if not MIN_SCALE <= value < float("inf"):
            raise ValueError(f"{value} must be a finite number from {MIN_SCALE}")
        return {"name": "fixed", "scale": value, "drop_overflow_update": False}
    return value


LossScale = Annotated[
    LossScaleSpec, ComponentOf("loss_scale"), BeforeValidator(_convert_number), _AllowNumber()
]

LOSS_SCALE = "loss_scale"
MAX_CONSECUTIVE_OVERFLOWS = 1000
"""Consecutive overflows that a run survives: DynamicLossScaleManager's `bad_step_max`."""


class OverflowCounts(NamedTuple):
    """Counts for a loss scale that skips overflows, int32 scalars."""

    good_steps: Array
    """Steps since the last overflow or change of the scale; 0 with a fixed scale."""
    bad_steps: Array
    """Consecutive overflows up to now."""
    skipped_steps: Array
    """Overflows since the run began."""


class LossScaleState(NamedTuple):
    """The scale of the next step, float32 (), and the overflows so far; None if the scale skips
    none."""

    scale: Array
    overflows: OverflowCounts | None

    @property
    def left_out(self) -> Array | None:
        """The steps of the run without an update."""
        return None if self.overflows is None else self.overflows.skipped_steps


@dataclass(frozen=True)
class ScaledLoss(StepFeature):
    """The loss scale of a step, and the skipping of overflows."""

    name: ClassVar[str] = LOSS_SCALE
    scaling: LossScaling

    def init(self, trained: Any) -> LossScaleState:
        import jax.numpy as jnp

        zero = jnp.zeros((), jnp.int32)
        counts = OverflowCounts(zero, zero, zero) if self.scaling.skips_overflow else None
        return LossScaleState(jnp.asarray(self.scaling.initial, jnp.float32), counts)

    def get_loss_scale(self, state: TrainState) -> Array:
        return get_loss_scale_state(state).scale

    def decide(
        self, state: TrainState, outcome: StepOutcome, loss: Array, grad_norm: Array
    ) -> StepOutcome:
        """Return the outcome with overflows. A non-finite loss isn't an overflow, since a smaller
        scale wouldn't make it finite."""
        import jax.numpy as jnp

        counts = get_loss_scale_state(state).overflows
        if counts is None:
            return outcome
        overflow = jnp.isfinite(loss) & ~jnp.isfinite(grad_norm)
        return outcome._replace(overflow=overflow & (counts.bad_steps < MAX_CONSECUTIVE_OVERFLOWS))

    def change_step(self, state: TrainState, outcome: StepOutcome) -> TrainState:
        """Return the state with the scale of the next step, and with an overflow counted. After a
        step that was neither applied nor an overflow, the state is the same."""
        import jax
        import jax.numpy as jnp

        part = get_loss_scale_state(state)
        before = part.overflows
        if before is None:
            return state
        overflow = outcome.overflow
        scale, good_steps = self.scaling.next(part.scale, before.good_steps, overflow)
        counts = OverflowCounts(
            good_steps,
            jnp.where(overflow, before.bad_steps + 1, 0),
            before.skipped_steps + overflow,
        )
        after = (state.step + overflow, scale, counts)
        unchanged = (state.step, part.scale, before)
        step, scale, counts = jax.tree.map(
            lambda new, old: jnp.where(outcome.applied | overflow, new, old), after, unchanged
        )
        return replace(state, step=step).replace_part(LOSS_SCALE, LossScaleState(scale, counts))


def get_loss_scale_state(state: TrainState) -> LossScaleState:
    """Return the loss scale's part of the state of a step that has one."""
    part: LossScaleState = state.features[LOSS_SCALE]
    return part
