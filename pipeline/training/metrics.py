"""Evaluation metrics: sums on the device, and figures computed from them on the host."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

from pipeline.core.errors import RunError, first_line
from pipeline.training.component_specs import MetricSpec

MAX_CONFUSION_CLASSES = 10_000
"""The largest number of classes with a confusion matrix: 400 MB of int32."""
ALL_IN_TOP5 = 5
"""Up to this number of classes top5 is always 1, and isn't reported."""


@register_dataclass
@dataclass(frozen=True)
class ClassSums:
    """Numbers of labels of C classes. Up to MAX_CONFUSION_CLASSES classes `by_class` is None, with
    more classes `confusion` is None."""

    top5: jax.Array
    """int32 (): labels whose class has one of the five highest logits."""
    confusion: jax.Array | None
    """int32 (C, C): labels by true class (row) and predicted class (column)."""
    by_class: jax.Array | None
    """int32 (3, C): by class, the labels predicted right, all labels, and the predictions."""


@register_dataclass
@dataclass(frozen=True)
class EvalSums:
    """Sums of an evaluation over batches. A sample has one label, or one at each position; sums are
    over the valid labels."""

    loss_sum: jax.Array
    """float32 ()."""
    loss_carry: jax.Array
    """float32 (): the rounding error of `loss_sum`."""
    samples: jax.Array
    """int32 (): valid samples."""
    count: jax.Array
    """int32 (): valid labels."""
    classes: ClassSums | None
    """None if labels are not classes."""
    component_sums: tuple[Any, ...] = ()
    """The sums of each metric component, in the order of the recipe."""


def zero_sums(
    outputs: int, metrics: Sequence[MetricSpec] = (), *, has_classes: bool = True
) -> EvalSums:
    """Return sums of zero samples, for a network with this number of outputs. `has_classes` is
    whether labels are classes."""
    classes = None
    if has_classes:
        has_matrix = outputs <= MAX_CONFUSION_CLASSES
        classes = ClassSums(
            top5=jnp.zeros((), jnp.int32),
            confusion=jnp.zeros((outputs, outputs), jnp.int32) if has_matrix else None,
            by_class=None if has_matrix else jnp.zeros((3, outputs), jnp.int32),
        )
    return EvalSums(
        loss_sum=jnp.zeros((), jnp.float32),
        loss_carry=jnp.zeros((), jnp.float32),
        samples=jnp.zeros((), jnp.int32),
        count=jnp.zeros((), jnp.int32),
        classes=classes,
        component_sums=tuple(jax.tree.map(jnp.asarray, metric.zero(outputs)) for metric in metrics),
    )


def add_batch(
    sums: EvalSums,
    logits: jax.Array,
    labels: jax.Array,
    losses: jax.Array,
    mask: jax.Array,
    where: jax.Array | None = None,
) -> EvalSums:
    """Return the sums with a batch added, except sums of metric components (`add_metric_sums`).

    Takes logits (B, ..., C), and labels (B, ...) int or (B, ..., C) float, whose class is the
    argmax. `mask`, bool (B,), marks the valid samples, and `where`, bool (B, ...), the valid
    labels. Losses (B,) are means over a sample's valid labels. Of equal logits the lower class
    ranks first.
    """
    samples = sums.samples + jnp.sum(mask, dtype=jnp.int32)
    if logits.ndim > 2:
        losses = jnp.repeat(losses, math.prod(logits.shape[1:-1]))
        logits, labels, mask = _flatten_labels(logits, labels, mask)
    if where is not None:
        mask = mask & where.reshape(-1)
    loss_sum, loss_carry = _add_compensated(
        sums.loss_sum, sums.loss_carry, jnp.sum(jnp.where(mask, losses, 0), dtype=jnp.float32)
    )
    return replace(
        sums,
        loss_sum=loss_sum,
        loss_carry=loss_carry,
        samples=samples,
        count=sums.count + jnp.sum(mask, dtype=jnp.int32),
        classes=None if sums.classes is None else _add_classes(sums.classes, logits, labels, mask),
    )


def _add_classes(
    sums: ClassSums, logits: jax.Array, labels: jax.Array, mask: jax.Array
) -> ClassSums:
    """Return the sums with labels added, (N,) int or (N, C) float; `mask`, bool (N,), marks the
    valid labels."""
    true = labels if jnp.issubdtype(labels.dtype, jnp.integer) else jnp.argmax(labels, axis=-1)
    true = jnp.where(mask, true, 0)  # Invalid labels may be outside the classes.
    predicted = jnp.argmax(logits, axis=-1)
    weights = mask.astype(jnp.int32)
    confusion = by_class = None
    if sums.confusion is not None:
        confusion = sums.confusion.at[true, predicted].add(weights)
    if sums.by_class is not None:
        hits, label_counts, prediction_counts = sums.by_class
        hits = hits.at[true].add(weights * (true == predicted))
        label_counts = label_counts.at[true].add(weights)
        prediction_counts = prediction_counts.at[predicted].add(weights)
        by_class = jnp.stack([hits, label_counts, prediction_counts])
    top5 = sums.top5 + jnp.sum(mask & _is_in_top5(logits, true), dtype=jnp.int32)
    return ClassSums(top5, confusion, by_class)


def add_metric_sums(
    sums: EvalSums,
    metrics: Sequence[MetricSpec],
    logits: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    where: jax.Array | None = None,
) -> EvalSums:
    """Return the sums of the metric components with a batch added.

    Takes logits (B, ..., C), labels (B, ...) int or (B, ..., C) float and the mask of the valid
    samples, bool (B,). With `where`, bool (B, ...), the mask of the labels that aren't ignored,
    metrics get each label as a sample. Raises ValueError if a metric's `sums` and `zero` return
    different shapes.
    """
    logits = logits.astype(jnp.float32)
    if where is not None:
        if logits.ndim > 2:
            logits, labels, mask = _flatten_labels(logits, labels, mask)
        mask = mask & where.reshape(-1)
    component_sums = []
    for metric, before in zip(metrics, sums.component_sums, strict=True):
        added = metric.sums(logits, labels, mask)
        if jax.tree.map(jnp.shape, added) != jax.tree.map(jnp.shape, before):
            raise ValueError(
                f"eval.metrics {metric.name}: sums has shapes {jax.tree.map(jnp.shape, added)}, "
                f"zero has {jax.tree.map(jnp.shape, before)}; must be the same"
            )
        component_sums.append(
            jax.tree.map(lambda a, b: a + jnp.asarray(b).astype(a.dtype), before, added)
        )
    return replace(sums, component_sums=tuple(component_sums))


def add_sums(sums: EvalSums, added: EvalSums) -> EvalSums:
    """Return the sums of both. `loss_carry` is the rounding error of `sums` and of this addition;
    the one of `added` is dropped."""
    loss_sum, loss_carry = _add_compensated(sums.loss_sum, sums.loss_carry, added.loss_sum)
    total = jax.tree.map(jnp.add, sums, added)
    return replace(total, loss_sum=loss_sum, loss_carry=loss_carry)


def _flatten_labels(
    logits: jax.Array, labels: jax.Array, mask: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Return logits (N, C), labels (N,) or (N, C) and the mask (N,) of all positions."""
    mask = jnp.repeat(mask, math.prod(logits.shape[1:-1]))
    labels = labels.reshape(-1, *labels.shape[logits.ndim - 1 :])
    return logits.reshape(-1, logits.shape[-1]), labels, mask


def _add_compensated(
    total: jax.Array, carry: jax.Array, value: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """Return Kahan's sum and its new rounding error. A plain float32 sum is off by a share of 1e-5
    after 1875 batches."""
    addend = value + carry
    new_total = total + addend
    return new_total, addend - (new_total - total)


def _is_in_top5(logits: jax.Array, true: jax.Array) -> jax.Array:
    """Return whether fewer than five logits rank before the true class's logit, bool (B,)."""
    classes = jnp.arange(logits.shape[-1])
    true_logit = jnp.take_along_axis(logits, true[:, None], axis=-1)
    # NaN never ranks after, so a network that diverged has no hits.
    ranks_after = (logits < true_logit) | ((logits == true_logit) & (classes > true[:, None]))
    return logits.shape[-1] - 1 - jnp.sum(ranks_after, axis=-1) < ALL_IN_TOP5


def summarize(
    sums: EvalSums, class_names: Sequence[str], metrics: Sequence[MetricSpec] = ()
) -> dict[str, Any]:
    """Return the metrics by name: the mean loss, the number of valid labels as "count", the metric
    components, and for classes the standard metrics.

    The standard metrics are accuracy, top5 for more than ALL_IN_TOP5 classes, precision, recall and
    f1. The last three are {"macro", "micro", "per_class": {name: value}}, without "per_class" for
    more than MAX_CONFUSION_CLASSES classes. A ratio with denominator 0 is 0, such as the precision
    of a class that is never predicted. The macro mean is over all classes. Raises ValueError if
    there are no samples or the names don't fit the classes, RunError if a metric component fails.
    """
    count = int(sums.count)
    if count == 0:
        raise ValueError("no samples were evaluated; the evaluation split must have at least one")
    shares: dict[str, Any] = {}
    averages: dict[str, Any] = {}
    if sums.classes is not None:
        shares, averages = _summarize_classes(sums.classes, count, class_names)
    components = {
        metric.name: _compute_component(metric, component_sums)
        for metric, component_sums in zip(metrics, sums.component_sums, strict=True)
    }
    mean_loss = float(sums.loss_sum) / count
    return {**shares, "loss": mean_loss, "count": count, **averages, **components}


def _summarize_classes(
    sums: ClassSums, count: int, class_names: Sequence[str]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the shares of labels, accuracy and perhaps top5, and the averages over classes,
    precision, recall and f1. Raises ValueError if the names don't fit the classes."""
    hits, actual, predicted = _count_by_class(sums)
    if len(set(class_names)) != len(hits) or len(class_names) != len(hits):
        raise ValueError(
            f"{len(hits)} classes need {len(hits)} different names, not {list(class_names)}"
        )
    shares = {"accuracy": int(hits.sum()) / count}
    if len(hits) > ALL_IN_TOP5:
        shares["top5"] = int(sums.top5) / count
    averages = {
        "precision": _average_ratios(hits, predicted, class_names),
        "recall": _average_ratios(hits, actual, class_names),
        "f1": _average_ratios(2 * hits, actual + predicted, class_names),
    }
    return shares, averages


def _compute_component(metric: MetricSpec, sums: Any) -> float:
    """Return the value of a metric component. Raises RunError if it fails."""
    try:
        return float(metric.value(sums))
    except Exception as error:
        problem = f"{type(error).__name__}: {first_line(error)}"
        raise RunError(f"eval.metrics {metric.name}: value: {problem}") from error


def _count_by_class(sums: ClassSums) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return by class the numbers of labels predicted right, of labels and of predictions, int64
    (C,) each."""
    if sums.confusion is None:
        hits, actual, predicted = np.asarray(sums.by_class, np.int64)
        return hits, actual, predicted
    confusion = np.asarray(sums.confusion, np.int64)
    return np.diag(confusion), confusion.sum(axis=1), confusion.sum(axis=0)


def _average_ratios(
    parts: np.ndarray, wholes: np.ndarray, class_names: Sequence[str]
) -> dict[str, Any]:
    """Return the mean of the ratios part / whole as "macro", the ratio of the totals as "micro",
    and the ratio of each class as "per_class". 0 / 0 is 0."""
    ratios = np.divide(parts, wholes, out=np.zeros(len(parts)), where=wholes > 0)
    averages = {"macro": float(ratios.mean()), "micro": int(parts.sum()) / int(wholes.sum())}
    if len(ratios) > MAX_CONFUSION_CLASSES:
        return averages
    return {**averages, "per_class": dict(zip(class_names, ratios.tolist(), strict=True))}
