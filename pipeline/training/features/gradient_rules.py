"""Ways to compute the gradients of a step: one backward pass, scaled or not, or two (SAM)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from pydantic import PositiveFloat

from pipeline.core.registry import component
from pipeline.training.component_specs import Backward, GradientSpec
from pipeline.training.step_feature import StepFeature

if TYPE_CHECKING:
    import jax

    from pipeline.training.forward_pass import ForwardPass, PassResults

GRADIENTS_DRAW = 2**31 - 1
"""Number that derives the key of custom gradients from the dropout key. The numbers of microbatches
and shards, which derive keys too, are smaller."""


@dataclass(frozen=True)
class GradientRule(StepFeature):
    """Gradients that a function computes from backward passes."""

    name: ClassVar[str] = "gradients"
    compute: Callable[[Backward, Any, jax.Array], tuple[Any, Any]]
    """(backward, parameters, key) -> gradients, auxiliary outputs."""

    def differentiate(self, forward: ForwardPass, trained: Any) -> tuple[Any, PassResults]:
        import jax

        key = jax.random.fold_in(forward.batch.dropout_key, GRADIENTS_DRAW)
        return self.compute(forward.differentiate, trained, key)


@component("gradients")
class PlainGradients(GradientSpec):
    """The gradients of the loss."""

    name: Literal["plain"] = "plain"

    def build(self) -> Callable[[Backward, Any, jax.Array], tuple[Any, Any]]:
        return lambda backward, parameters, key: backward(parameters)


@component("gradients")
class ScaledGradients(GradientSpec):
    """The gradients of the loss times `factor`, the `sens` of MindSpore's TrainOneStepCell.

    The recorded loss isn't scaled. Unlike a loss scale, the factor reaches the optimizer.
    """

    name: Literal["scaled"] = "scaled"
    factor: PositiveFloat = 1.0

    def build(self) -> Callable[[Backward, Any, jax.Array], tuple[Any, Any]]:
        import jax

        def scaled(backward: Backward, parameters: Any, key: jax.Array) -> tuple[Any, Any]:
            gradients, auxiliary = backward(parameters)
            return jax.tree.map(lambda g: g * self.factor, gradients), auxiliary

        return scaled


@component("gradients")
class SharpnessAware(GradientSpec):
    """Gradients at the highest loss within distance `rho` (SAM, arXiv 2010.01412, eq. 2).

    The parameters with the highest loss are estimated by one step of length `rho` along the
    gradients. The recorded loss and the running statistics belong to the unchanged parameters.
    """

    name: Literal["sam"] = "sam"
    rho: PositiveFloat = 0.05

    def build(self) -> Callable[[Backward, Any, jax.Array], tuple[Any, Any]]:
        import jax
        import jax.numpy as jnp
        import optax

        def sharpness_aware(backward: Backward, parameters: Any, key: jax.Array) -> tuple[Any, Any]:
            gradients, auxiliary = backward(parameters)
            # The maximum avoids a division by 0.
            factor = self.rho / jnp.maximum(optax.tree.norm(gradients), 1e-12)
            shifted = jax.tree.map(lambda p, g: p + factor * g, parameters, gradients)
            gradients, _ = backward(shifted)
            return gradients, auxiliary

        return sharpness_aware
