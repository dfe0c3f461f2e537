"""A penalty on the gradient of the loss by the inputs.

Drucker and LeCun, Improving generalization performance using double backpropagation, 1992.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveFloat

from pipeline.core.registry import component
from pipeline.training.features.feature_spec import FeatureContext, FeatureSpec
from pipeline.training.step_feature import StepFeature

if TYPE_CHECKING:
    from jax import Array

    from pipeline.training.forward_pass import ForwardPass, Outputs
    from pipeline.training.state import Inputs


@component("feature")
class GradientPenaltySpec(FeatureSpec):
    """Adds `weight` / 2 times the squared norm of the gradient of each sample's loss by its inputs,
    as the network reads them."""

    applies_network: ClassVar[bool] = True
    name: Literal["gradient_penalty"] = "gradient_penalty"
    weight: PositiveFloat = 0.1

    def build(self, context: FeatureContext) -> StepFeature:
        if context.reads_tokens:
            raise ValueError("tokens have no gradients; must be left out for texts")
        return GradientPenalty(self.weight)


@dataclass(frozen=True)
class GradientPenalty(StepFeature):
    """The penalty, which is a part of each sample's loss."""

    name: ClassVar[str] = "gradient_penalty"
    weight: float

    def change_outputs(self, forward: ForwardPass, trained: Any, outputs: Outputs) -> Outputs:
        import jax
        import jax.numpy as jnp

        from pipeline.training.losses import compute_losses

        def sum_losses(inputs: Inputs) -> Array:
            logits, _ = forward.apply(trained, forward.collections, inputs)
            losses = compute_losses(forward.config, logits, forward.batch.labels)
            return jnp.where(forward.batch.mask, losses, 0).sum()

        by_inputs = jax.tree.leaves(jax.grad(sum_losses)(forward.batch.inputs))
        squares = sum(jnp.square(leaf).sum(axis=tuple(range(1, leaf.ndim))) for leaf in by_inputs)
        return outputs._replace(losses=outputs.losses + self.weight / 2 * squares)
