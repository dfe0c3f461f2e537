"""Accumulation of gradients over steps, until they are of a number of labels."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveInt

from pipeline.core.errors import RecipeError
from pipeline.core.registry import component
from pipeline.training.features.averages import LabelCount
from pipeline.training.step_feature import FeatureContext, FeatureSpec, StepFeature, UpdateOptimizer

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.state import Gradients, TrainState
    from pipeline.training.telemetry import StepOutcome


@component("feature")
class AccumulateLabelsSpec(FeatureSpec):
    """Updates the parameters when the gradients since the last update are of at least `labels`
    valid labels: of tokens, pixels or samples. The update's gradients are the mean over these
    labels. Steps, and the learning rates, go on at every batch."""

    name: Literal["accumulate_labels"] = "accumulate_labels"
    labels: PositiveInt

    def check(self, recipe: Any) -> Iterator[str]:
        reduction = recipe.train.loss.reduction
        if reduction != "mean":
            yield f"train.loss.reduction = {reduction}: must be mean with accumulate_labels"
        optimizer = recipe.train.optimizer
        if optimizer.observes_layers or optimizer.averages_iterates:
            name = optimizer.name
            yield f"train.optimizer = {name}: must be another optimizer with accumulate_labels"

    def build(self, context: FeatureContext) -> StepFeature:
        return AccumulateLabels(self.labels)


@dataclass(frozen=True)
class AccumulateLabels(LabelCount):
    """Updates by the gradients of a number of labels. Its state is the sum of gradients since the
    last update, weighted by labels: {"sum": a tree in the form of the trained parameters, "labels":
    float32 ()}."""

    name: ClassVar[str] = "accumulate_labels"
    labels: int
    columns: tuple[str, ...] = ("accumulated_labels",)

    @property
    def is_like_params(self) -> bool:
        return True

    def init(self, trained: Any) -> Any:
        import jax
        import jax.numpy as jnp

        return {"sum": jax.tree.map(jnp.zeros_like, trained), "labels": jnp.float32(0)}

    def make_columns(
        self, state: TrainState, gradients: Gradients, outcome: StepOutcome
    ) -> tuple[Array, ...]:
        return (state.features[self.name]["labels"] + gradients.sums[self.name],)

    def change_optimizer(
        self, update: UpdateOptimizer, state: TrainState, gradients: Gradients
    ) -> UpdateOptimizer:
        import jax
        import jax.numpy as jnp

        def update_when_due(values: Any) -> tuple[Any, Any]:
            if values is not gradients.values:
                # The sum of `change_update` would lack the change.
                raise RecipeError(
                    f"train.features: {self.name} must come after the features that change the "
                    "gradients of an update"
                )
            total, labels, is_due = self._add(state, gradients)
            mean = jax.tree.map(lambda s: s / jnp.maximum(labels, 1), total)
            directions, opt_state = update(mean)

            def select(new: Array, old: Array | float) -> Array:
                return jnp.where(is_due, new, old)

            directions = jax.tree.map(lambda d: select(d, 0.0), directions)
            return directions, jax.tree.map(select, opt_state, state.opt_state)

        return update_when_due

    def change_update(
        self, before: TrainState, after: TrainState, gradients: Gradients, count: Array | int
    ) -> TrainState:
        import jax
        import jax.numpy as jnp

        total, labels, is_due = self._add(before, gradients)
        part = {"sum": total, "labels": labels}
        part = jax.tree.map(lambda x: jnp.where(is_due, 0, x), part)
        return after.replace_part(self.name, part)

    def _add(self, state: TrainState, gradients: Gradients) -> tuple[Any, Array, Array]:
        """Return the sums with this step's gradients, which are a mean over its labels, and whether
        an update is due."""
        import jax

        before = state.features[self.name]
        number = gradients.sums[self.name]
        total = jax.tree.map(lambda s, g: s + number * g, before["sum"], gradients.values)
        labels = before["labels"] + number
        return total, labels, labels >= self.labels
