"""Evaluation metrics: sums kept on the device, figures worked out of them on the host (E-01)."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass


@register_dataclass
@dataclass(frozen=True)
class EvalSums:
    """What evaluation adds up, batch after batch, over C classes.

    A sample has one label, or one at each of its positions, and every label counts.
    """

    loss_sum: jax.Array
    """float32 ()."""
    loss_carry: jax.Array
    """float32 (): what rounding has kept out of `loss_sum` so far."""
    count: jax.Array
    """int32 (): labels."""
    top5: jax.Array
    """int32 (): labels whose class is among the min(5, C) highest logits."""
    confusion: jax.Array
    """int32 (C, C): labels by true class (row) and predicted class (column)."""


def zero_sums(classes: int) -> EvalSums:
    """The sums of no samples."""
    return EvalSums(
        loss_sum=jnp.zeros((), jnp.float32),
        loss_carry=jnp.zeros((), jnp.float32),
        count=jnp.zeros((), jnp.int32),
        top5=jnp.zeros((), jnp.int32),
        confusion=jnp.zeros((classes, classes), jnp.int32),
    )


def add_batch(
    sums: EvalSums, logits: jax.Array, labels: jax.Array, losses: jax.Array, mask: jax.Array
) -> EvalSums:
    """Add the samples that `mask` (B,) bool marks as real; the others pad the batch.

    Takes logits (B, ..., C), labels (B, ...) int or (B, ..., C) float, which count as the class of
    their maximum, and losses (B,). Among equal logits the lower class ranks first.
    """
    if logits.ndim > 2:
        logits, labels, losses, mask = _every_label(logits, labels, losses, mask)
    true = labels if jnp.issubdtype(labels.dtype, jnp.integer) else jnp.argmax(labels, axis=-1)
    predicted = jnp.argmax(logits, axis=-1)
    loss_sum, loss_carry = _compensated_add(
        sums.loss_sum, sums.loss_carry, jnp.sum(jnp.where(mask, losses, 0), dtype=jnp.float32)
    )
    return EvalSums(
        loss_sum=loss_sum,
        loss_carry=loss_carry,
        count=sums.count + jnp.sum(mask, dtype=jnp.int32),
        top5=sums.top5 + jnp.sum(mask & _in_top(5, logits, true), dtype=jnp.int32),
        confusion=sums.confusion.at[true, predicted].add(mask.astype(jnp.int32)),
    )


def _every_label(
    logits: jax.Array, labels: jax.Array, losses: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Logits (N, C), labels (N,) or (N, C), losses and mask (N,) of all positions of all samples.

    The loss of a sample is the mean over its positions, and so stands for each of them.
    """
    positions = math.prod(logits.shape[1:-1])
    flat_labels = labels.reshape(-1, *labels.shape[logits.ndim - 1 :])
    logits = logits.reshape(-1, logits.shape[-1])
    return logits, flat_labels, jnp.repeat(losses, positions), jnp.repeat(mask, positions)


def _compensated_add(
    total: jax.Array, carry: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Kahan's sum: plain float32 drifts by 1e-5 over the 1875 batches of 60,000 samples."""
    wanted = value + carry
    new_total = total + wanted
    return new_total, wanted - (new_total - total)


def _in_top(k: int, logits: jax.Array, true: jax.Array) -> jax.Array:
    """Whether fewer than k logits rank before the true class's, (B,) bool."""
    classes = jnp.arange(logits.shape[-1])
    own = jnp.take_along_axis(logits, true[:, None], axis=-1)
    # Counted from below, where NaN never is: a network that diverged gets no hits.
    behind = (logits < own) | ((logits == own) & (classes > true[:, None]))
    return logits.shape[-1] - 1 - jnp.sum(behind, axis=-1) < k


def summarize(sums: EvalSums, class_names: Sequence[str]) -> dict[str, Any]:
    """Accuracy, top5, mean loss, count, and precision, recall and f1 of `sums`.

    The last three are {"macro", "micro", "per_class": {name: value}}. A ratio whose denominator
    is 0, such as the precision of a class never predicted, is 0, and the macro mean is over all
    classes. With one label per sample each micro mean equals the accuracy.
    Raises ValueError when there are no samples or the names do not fit the classes.
    """
    confusion = np.asarray(sums.confusion, np.int64)
    count = int(sums.count)
    if count == 0:
        raise ValueError("no samples were evaluated; give the evaluation split at least one")
    if len(set(class_names)) != len(confusion) or len(class_names) != len(confusion):
        raise ValueError(
            f"{len(confusion)} classes need as many different names; given: {list(class_names)}"
        )
    hits, actual, predicted = np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)
    return {
        "accuracy": int(hits.sum()) / count,
        "top5": int(sums.top5) / count,
        "loss": float(sums.loss_sum) / count,
        "count": count,
        "precision": _averages(hits, predicted, class_names),
        "recall": _averages(hits, actual, class_names),
        "f1": _averages(2 * hits, actual + predicted, class_names),
    }


def _averages(parts: np.ndarray, wholes: np.ndarray, class_names: Sequence[str]) -> dict[str, Any]:
    """Ratios part / whole, 0 where the whole is 0: per class, their mean, and of the totals."""
    ratios = np.divide(parts, wholes, out=np.zeros(len(parts)), where=wholes > 0)
    return {
        "macro": float(ratios.mean()),
        "micro": int(parts.sum()) / int(wholes.sum()),
        "per_class": dict(zip(class_names, ratios.tolist(), strict=True)),
    }
