"""A feature of the step for the golden runs. A changed byte makes their resume a refusal."""

from dataclasses import dataclass, replace
from typing import Any, ClassVar, Literal

from pipeline.api import FeatureContext, FeatureSpec, StepFeature, component


@component("feature")
class CountedStepsSpec(FeatureSpec):
    """A feature that counts updates."""

    name: Literal["counted_steps"] = "counted_steps"

    def build(self, context: FeatureContext) -> StepFeature:
        """Return the feature of a run."""
        return CountedSteps()


@dataclass(frozen=True)
class CountedSteps(StepFeature):
    """A number of updates in the state."""

    name: ClassVar[str] = "counted_steps"

    def init(self, trained: Any) -> Any:
        """Return the number at step 0."""
        import jax.numpy as jnp

        return jnp.int32(0)

    def change_update(self, before: Any, after: Any, gradients: Any, count: Any) -> Any:
        """Return the state after an update."""
        return replace(
            after, features={**after.features, self.name: before.features[self.name] + 1}
        )
