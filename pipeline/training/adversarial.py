"""The loss and the metrics of a generator and a discriminator (Goodfellow et al. 2014).

The layer `adversarial` returns three scores for each sample, (B, 3). The first is of the real
image. The second and third are of the same generated image, to train the discriminator and the
generator. Labels (B, 3) are 1, 0, 1.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np

from pipeline.core.registry import component
from pipeline.data.columns import Task
from pipeline.training.component_specs import Direction, MetricSpec
from pipeline.training.losses import LabelLoss

if TYPE_CHECKING:
    from collections.abc import Callable

    import jax
    from numpy.typing import ArrayLike

SCORE_WEIGHTS = {"discriminator_loss": (0.5, 0.5, 0.0), "generator_loss": (0.0, 0.0, 1.0)}
"""The weights of the three scores' cross-entropies, by loss."""


def _weigh_entropies(scores: jax.Array, labels: jax.Array, weights: ArrayLike) -> jax.Array:
    """Return the weighted sum of the cross-entropies of scores (B, 3), float32 (B,)."""
    import optax

    entropies = optax.sigmoid_binary_cross_entropy(scores, labels)
    return (entropies * np.asarray(weights, np.float32)).sum(axis=-1)


@component("loss")
class AdversarialLoss(LabelLoss):
    """The sum of the discriminator's loss and the generator's loss.

    The discriminator's loss trains the discriminator alone, and the generator's loss the generator
    alone. Each part can get better at the cost of the other, so the sum needn't fall.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("multi_label",)
    name: Literal["adversarial"] = "adversarial"

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        weights = np.sum(list(SCORE_WEIGHTS.values()), axis=0)
        return lambda scores, labels: _weigh_entropies(scores, labels, weights)


class AdversarialMetric(MetricSpec):
    """Base of the mean losses of the discriminator and the generator."""

    better: ClassVar[Direction] = "min"

    def zero(self, classes: int) -> Any:
        """Return a sum of losses and a number of samples, both 0, float32 ()."""
        return {"losses": np.zeros((), np.float32), "samples": np.zeros((), np.float32)}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        losses = jnp.where(mask, _weigh_entropies(logits, labels, SCORE_WEIGHTS[self.name]), 0)
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
