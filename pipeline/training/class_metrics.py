"""Metrics of classes: overlap, accuracy of pixels and of classes, calibration of probabilities."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PositiveInt

from pipeline.core.registry import part
from pipeline.training.part_specs import Direction, MetricSpec

if TYPE_CHECKING:
    import jax


class ClassCountMetric(MetricSpec):
    """Base of the metrics of class labels, one for a sample or one for each of its positions.

    Labels outside of the classes, and `ignore_index`, don't count.
    """

    ignore_index: int | None = None
    """null: dataset.ignore_index."""

    def ignoring(self, label: int | None) -> Self:
        if self.ignore_index is not None:
            return self
        return self.model_copy(update={"ignore_index": label})

    def zero(self, classes: int) -> Any:
        """By class the labels predicted right, the labels, and the predictions."""
        none = np.zeros(classes, np.int32)
        return {"hits": none, "actual": none, "predicted": none}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        classes = logits.shape[-1]
        if not jnp.issubdtype(labels.dtype, jnp.integer):
            labels = jnp.argmax(labels, axis=-1)
        labels = labels.astype(jnp.int32)
        predicted = jnp.argmax(logits, axis=-1).astype(jnp.int32)
        valid = (labels >= 0) & (labels < classes)
        valid &= mask.reshape(-1, *(1,) * (labels.ndim - 1))
        if self.ignore_index is not None:
            valid &= labels != self.ignore_index

        def count(indices: jax.Array, where: jax.Array) -> jax.Array:
            # One more entry takes what is not counted.
            place = jnp.where(where, indices, classes).ravel()
            return jnp.zeros(classes + 1, jnp.int32).at[place].add(1)[:classes]

        return {
            "hits": count(labels, valid & (labels == predicted)),
            "actual": count(labels, valid),
            "predicted": count(predicted, valid),
        }


@part("metric")
class MeanIou(ClassCountMetric):
    """The mean over classes of intersection over union: of the labels that are of a class or
    predicted as it, the share that is both. Classes that are neither don't count."""

    name: Literal["mean_iou"] = "mean_iou"

    def value(self, sums: Any) -> float:
        hits, actual, predicted = (
            np.asarray(sums[key], np.float64) for key in ("hits", "actual", "predicted")
        )
        union = actual + predicted - hits
        there = union > 0
        return float((hits[there] / union[there]).mean()) if there.any() else 0.0


@part("metric")
class PixelAccuracy(ClassCountMetric):
    """The share of labels that are predicted right; of masks, of their pixels."""

    name: Literal["pixel_accuracy"] = "pixel_accuracy"

    def value(self, sums: Any) -> float:
        count = int(np.asarray(sums["actual"], np.int64).sum())
        return int(np.asarray(sums["hits"], np.int64).sum()) / count if count else 0.0


@part("metric")
class BalancedAccuracy(ClassCountMetric):
    """The mean recall of the classes that have labels: accuracy if all were equally frequent."""

    name: Literal["balanced_accuracy"] = "balanced_accuracy"

    def value(self, sums: Any) -> float:
        hits, actual = (np.asarray(sums[key], np.float64) for key in ("hits", "actual"))
        there = actual > 0
        return float((hits[there] / actual[there]).mean()) if there.any() else 0.0


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
        """By bin the samples, the right predictions, and the sum of probabilities: (3, bins)."""
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

    Raises ValueError if samples have several labels.
    """
    import jax.numpy as jnp

    _require_one_label(logits)
    return labels if jnp.issubdtype(labels.dtype, jnp.integer) else labels.argmax(axis=-1)


def _require_one_label(logits: jax.Array) -> None:
    if logits.ndim != 2:
        raise ValueError(f"takes logits (batch, classes); these have shape {logits.shape}")
