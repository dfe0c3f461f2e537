"""Focal losses (Lin et al. 2017, "Focal Loss for Dense Object Detection"): easy labels count less.

The loss of a label is its cross-entropy times (1 - p)^gamma, with p the predicted probability of
what is true. Soft targets get the sum over what may be true, weighted by the targets. So the loss
of labels that are mixed by lambda is the same mixture of their losses.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, Self

from pydantic import Field, NonNegativeFloat

from pipeline.core.registry import component
from pipeline.data.targets import Targets, Task
from pipeline.training.losses import (
    ClassWeights,
    LabelLoss,
    OutputLoss,
    fit_class_weights,
    make_class_weights,
)

if TYPE_CHECKING:
    import jax


@component("loss")
class Focal(LabelLoss):
    """Softmax cross-entropy of each label, times (1 - p)^gamma for probability p of its class.

    `gamma` 0 is cross-entropy. Class weights, the paper's alpha, multiply the loss of each class.
    The mean divides by the number of labels.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification", "next_token")
    reads_logits: ClassVar[bool] = True
    name: Literal["focal"] = "focal"
    gamma: NonNegativeFloat = 2.0
    class_weights: ClassWeights = None

    @property
    def needs_class_counts(self) -> bool:
        return self.class_weights == "balanced"

    def fit_to_targets(self, targets: Targets) -> Self:
        """Return the loss with a number for each class in place of `balanced`. Raises ValueError as
        `fit_class_weights` does."""
        if self.class_weights is None:
            return self
        weights = fit_class_weights(self.class_weights, targets)
        return self.model_copy(update={"class_weights": weights})

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        import jax.numpy as jnp
        from jax.nn import log_softmax

        weights = make_class_weights(self.class_weights)

        def focal(logits: jax.Array, targets: jax.Array) -> jax.Array:
            log_shares = log_softmax(logits, axis=-1)
            # A probability that is 1 but for rounding can be above 1.
            losses = -log_shares * _raise(jnp.maximum(-jnp.expm1(log_shares), 0), self.gamma)
            if weights is not None:
                losses = losses * weights
            return (jnp.where(targets != 0, losses, 0) * targets).sum(axis=-1)

        return focal


@component("loss")
class BinaryFocal(OutputLoss):
    """Cross-entropy of the sigmoid of each output, times (1 - p)^gamma for probability p of its
    label. The mean over the outputs of a sample.

    `alpha` multiplies the loss of labels that are 1, and 1 - alpha the others; null:
    both weigh 1.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("multi_label",)
    reads_logits: ClassVar[bool] = True
    name: Literal["binary_focal"] = "binary_focal"
    gamma: NonNegativeFloat = 2.0
    alpha: Annotated[float, Field(gt=0, lt=1)] | None = 0.25

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        from jax.nn import log_sigmoid, sigmoid

        positive = -log_sigmoid(outputs) * _raise(sigmoid(-outputs), self.gamma)
        negative = -log_sigmoid(-outputs) * _raise(sigmoid(outputs), self.gamma)
        if self.alpha is not None:
            positive, negative = self.alpha * positive, (1 - self.alpha) * negative
        return targets * positive + (1 - targets) * negative


def _raise(bases: jax.Array, exponent: float) -> jax.Array:
    """Return non-negative bases to a power, with a gradient of 0 at 0, where it may be infinite."""
    import jax.numpy as jnp

    if exponent == 0:
        return jnp.ones_like(bases)
    return jnp.where(bases > 0, jnp.where(bases > 0, bases, 1) ** exponent, 0)
