"""Lookahead: slow weights that follow the optimizer's fast weights.

Zhang et al., Lookahead optimizer: k steps forward, 1 step back, 2019 (arXiv 1907.08610).
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal

from pydantic import Field, PositiveInt

from pipeline.core.registry import component
from pipeline.training.features.common_features import WeightCopy
from pipeline.training.features.feature_spec import FeatureContext, FeatureSpec
from pipeline.training.step_feature import StepFeature
from pipeline.training.telemetry import count_updates

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import Gradients, TrainState


@component("feature")
class LookaheadSpec(FeatureSpec):
    """After every `steps` updates, slow weights move towards the trained parameters by the share
    `rate` of their distance, and training goes on from there."""

    name: Literal["lookahead"] = "lookahead"
    steps: PositiveInt = 5
    rate: Annotated[float, Field(gt=0, le=1)] = 0.5

    def check(self, recipe: Any) -> Iterator[str]:
        if recipe.train.optimizer.averages_iterates:
            name = recipe.train.optimizer.name
            yield f"train.optimizer = {name}: must be another optimizer with lookahead"

    def build(self, context: FeatureContext) -> StepFeature:
        return Lookahead(self.steps, self.rate)


@dataclass(frozen=True)
class Lookahead(WeightCopy):
    """Slow weights, which are its state."""

    name: ClassVar[str] = "lookahead"
    steps: int
    rate: float

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        import jax
        import jax.numpy as jnp

        from pipeline.training.state import merge_params, select_averaged

        slow = before.features[self.name]
        fast = select_averaged(slow, after.params)
        is_due = (count_updates(before) + 1) % self.steps == 0
        slow = jax.tree.map(lambda s, f: jnp.where(is_due, s + self.rate * (f - s), s), slow, fast)
        fast = jax.tree.map(lambda s, f: jnp.where(is_due, s, f), slow, fast)
        after = replace(after, params=merge_params(after.params, fast))
        return after.replace_part(self.name, slow)
