"""The loss and the metrics of a generator and a discriminator (Goodfellow et al. 2014).

The layer `adversarial` returns scores (B, 3): of real images, of generated images to train the
discriminator, and of the same generated images to train the generator. Labels (B, 3) are 1, 0, 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from pipeline.core.registry import component
from pipeline.data.targets import Task
from pipeline.training.component_specs import Direction, MetricSpec
from pipeline.training.losses import LabelLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax

WEIGHTS = {"discriminator_loss": (0.5, 0.5, 0.0), "generator_loss": (0.0, 0.0, 1.0)}
"""Weight of the cross-entropy of each score in a loss."""


def _weigh_entropies(scores: jax.Array, labels: jax.Array, weights: tuple[float, ...]) -> jax.Array:
    """Return the weighted sum of the cross-entropies of scores (B, 3), float32 (B,)."""
    import optax

    entropies = optax.sigmoid_binary_cross_entropy(scores, labels)
    return (entropies * np.asarray(weights, np.float32)).sum(axis=-1)


@component("loss")
class AdversarialLoss(LabelLoss):
    """The sum of the discriminator's loss and the generator's.

    Each loss trains only its part of the network, so the sum needn't fall during training.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("multi_label",)
    name: Literal["adversarial"] = "adversarial"

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        weights = tuple(map(sum, zip(*WEIGHTS.values(), strict=True)))
        return lambda scores, labels: _weigh_entropies(scores, labels, weights)


class AdversarialMetric(MetricSpec):
    """Base of the mean losses of the discriminator and the generator."""

    better: ClassVar[Direction] = "min"

    def zero(self, classes: int) -> Any:
        """Return the sum of losses and the number of samples, float32 () each."""
        return {"losses": np.zeros((), np.float32), "samples": np.zeros((), np.float32)}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        losses = jnp.where(mask, _weigh_entropies(logits, labels, WEIGHTS[self.name]), 0)
        return {"losses": losses.sum(), "samples": mask.sum().astype(jnp.float32)}

    def value(self, sums: Any) -> float:
        return float(sums["losses"]) / float(sums["samples"])


@component("metric")
class DiscriminatorLoss(AdversarialMetric):
    """Mean cross-entropy of the scores of real and generated images."""

    name: Literal["discriminator_loss"] = "discriminator_loss"


@component("metric")
class GeneratorLoss(AdversarialMetric):
    """Mean cross-entropy of the scores of generated images, with the labels of real images."""

    name: Literal["generator_loss"] = "generator_loss"
