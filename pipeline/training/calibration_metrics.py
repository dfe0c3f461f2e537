"""Metrics of a classifier's probabilities: whether they are as often right as they say."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal

import numpy as np
from pydantic import PositiveInt

from pipeline.core.registry import part
from pipeline.training.part_specs import Direction, MetricSpec

if TYPE_CHECKING:
    import jax


@part("metric")
class CalibrationError(MetricSpec):
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3), in `bins` equal bins.

    The mean distance between the probability of the predicted class and the share of right
    predictions, over bins of that probability. For one label a sample.
    """

    better: ClassVar[Direction] = "min"
    name: Literal["calibration_error"] = "calibration_error"
    bins: PositiveInt = 15

    def zero(self, classes: int) -> Any:
        """By bin the samples, those predicted right, and the sum of probabilities: (3, bins)."""
        return np.zeros((3, self.bins), np.float32)

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax
        import jax.numpy as jnp

        true = true_classes(logits, labels)
        probability = jax.nn.softmax(logits).max(axis=-1)
        # Bins are open below: 1 belongs to the last one.
        which = jnp.clip(jnp.ceil(probability * self.bins) - 1, 0, self.bins - 1).astype(jnp.int32)
        right = logits.argmax(axis=-1) == true
        values = jnp.stack([jnp.ones_like(probability), right, probability])
        return jnp.zeros((3, self.bins)).at[:, which].add(jnp.where(mask, values, 0))

    def value(self, sums: Any) -> float:
        samples, right, probability = np.asarray(sums, np.float64)
        return float(np.abs(right - probability).sum() / samples.sum())


@part("metric")
class BrierScore(MetricSpec):
    """Brier score (Brier 1950): the squared distance of all probabilities from the true class.

    For one label a sample, or probabilities as labels; 0 is best, 2 is worst.
    """

    better: ClassVar[Direction] = "min"
    name: Literal["brier"] = "brier"

    def zero(self, classes: int) -> Any:
        """The sum of squared distances, and the samples."""
        return np.zeros(2, np.float32)

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax
        import jax.numpy as jnp

        _require_one_label(logits)
        targets = labels
        if jnp.issubdtype(labels.dtype, jnp.integer):
            targets = jax.nn.one_hot(labels, logits.shape[-1])
        squares = jnp.square(jax.nn.softmax(logits) - targets).sum(axis=-1)
        return jnp.stack([jnp.where(mask, squares, 0).sum(), mask.sum().astype(jnp.float32)])

    def value(self, sums: Any) -> float:
        return float(sums[0] / sums[1])


def true_classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """The true class of every sample, int (B,), of integer labels or of one value for each class.

    Raises ValueError where samples have several labels.
    """
    import jax.numpy as jnp

    _require_one_label(logits)
    return labels if jnp.issubdtype(labels.dtype, jnp.integer) else labels.argmax(axis=-1)


def _require_one_label(logits: jax.Array) -> None:
    if logits.ndim != 2:
        raise ValueError(f"takes logits (batch, classes); these have shape {logits.shape}")
