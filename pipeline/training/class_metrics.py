"""Metrics of classes from counts by class: overlap, accuracy of pixels and of classes."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any, Literal, Self

import numpy as np

from pipeline.core.registry import part
from pipeline.training.part_specs import MetricSpec

if TYPE_CHECKING:
    import jax


class ClassCountMetric(MetricSpec):
    """Base of the metrics of labels of classes, one for a sample or one for each of its places.

    Labels outside of the classes, and `ignore_index`, don't count.
    """

    ignore_index: int | None = None
    """null: dataset.ignore_index."""

    def ignoring(self, label: int | None) -> Self:
        if self.ignore_index is not None:
            return self
        return self.model_copy(update={"ignore_index": label})

    def zero(self, classes: int) -> Any:
        """By class the labels predicted right, those there are, and those predicted."""
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

        def count(chosen: jax.Array, where: jax.Array) -> jax.Array:
            # One more entry takes what is not counted.
            place = jnp.where(where, chosen, classes).ravel()
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
    """The mean recall of the classes that are there: accuracy where all were equally frequent."""

    name: Literal["balanced_accuracy"] = "balanced_accuracy"

    def value(self, sums: Any) -> float:
        hits, actual = (np.asarray(sums[key], np.float64) for key in ("hits", "actual"))
        there = actual > 0
        return float((hits[there] / actual[there]).mean()) if there.any() else 0.0
