"""Losses that attacks of an evaluation maximize, from logits (B, C) and classes int32 (B,)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import optax
from jax import Array

from pipeline.training.robustness.ball import TINY

AttackLoss = Callable[[Array, Array], Array]
"""(logits (B, C), classes (B,)) -> float32 (B,), large for a wrong prediction."""


@dataclass(frozen=True)
class AttackedNetwork:
    """The network that is attacked, with the classes of a batch."""

    predict: Callable[[Array], Array]
    """(pixels (B, H, W, C)) -> logits (B, classes) float32."""
    labels: Array
    """int32 (B,)."""

    def is_fooled(self, pixels: Array) -> Array:
        """Return whether each prediction is wrong, bool (B,)."""
        return self.predict(pixels).argmax(axis=-1) != self.labels

    def differentiate(self, loss: AttackLoss, pixels: Array) -> tuple[Array, Array, Array]:
        """Return losses (B,), whether predictions are wrong, and gradients (B, H, W, C)."""

        def sum_losses(pixels: Array) -> tuple[Array, tuple[Array, Array]]:
            logits = self.predict(pixels)
            losses = loss(logits, self.labels)
            return losses.sum(), (losses, logits.argmax(axis=-1) != self.labels)

        (_, (losses, fooled)), gradients = jax.value_and_grad(sum_losses, has_aux=True)(pixels)
        return losses, fooled, gradients


def compute_margin(logits: Array, labels: Array) -> Array:
    """Return the largest other logit minus the logit of the class, (B,). It is above 0 for a wrong
    prediction, and the negative of `ledger.Readings.margin`."""
    is_label = jax.nn.one_hot(labels, logits.shape[-1], dtype=bool)
    others = jnp.where(is_label, -jnp.inf, logits).max(axis=-1)
    return others - jnp.take_along_axis(logits, labels[:, None], axis=-1)[:, 0]


def compute_logits_ratio(logits: Array, labels: Array) -> Array:
    """Return `compute_margin` divided by the difference between the largest and the third largest
    logit (Croce and Hein 2020, eq. 6). The ratio doesn't change if logits are scaled. It needs at
    least three classes."""
    ordered = jnp.sort(logits, axis=-1)
    return compute_margin(logits, labels) / (ordered[:, -1] - ordered[:, -3] + TINY)


LOSSES: Mapping[str, Any] = {
    "ce": optax.softmax_cross_entropy_with_integer_labels,
    "dlr": compute_logits_ratio,
}
"""Losses by their name in `ApgdAttack.losses`."""
