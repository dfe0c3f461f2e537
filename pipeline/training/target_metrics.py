"""Metrics for numbers, classes, several labels per sample, next tokens and probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.data.targets import Targets
from pipeline.training.component_specs import Direction, MetricSpec

if TYPE_CHECKING:
    import jax

NUMBER_METRICS = ("mae", "rmse", "r2")
LABEL_METRICS = ("exact_match", "micro_f1", "macro_f1")
TOKEN_METRICS = ("token_accuracy", "perplexity")
"""Names of the metrics of numbers, of several labels and of tokens."""


class NumberMetric(MetricSpec):
    """Base of the metrics of K standardised numbers."""

    better: ClassVar[Direction] = "min"
    std: Seq[float] = ()
    """Standard deviation of each number, in the units of the data; empty: not standardised."""

    def zero(self, classes: int) -> Any:
        """Return sums of absolute or squared errors, float32 (K,), and the number of samples."""
        return {"errors": np.zeros(classes, np.float32), "samples": np.zeros((), np.float32)}

    def _sum_errors(self, errors: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Return sums of errors (B, K) over valid samples, and the number of samples."""
        import jax.numpy as jnp

        valid = jnp.where(mask[:, None], errors, 0)
        return {"errors": valid.sum(axis=0), "samples": mask.sum().astype(jnp.float32)}

    def _average_in_data_units(self, errors: np.ndarray) -> float:
        """Return the mean of standardised errors, float64 (K,), in the units of the data."""
        units = np.asarray(self.std, np.float64) if self.std else np.ones(len(errors))
        return float((errors * units).mean())


def _subtract(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the errors (n, K). Raises ValueError if there aren't as many numbers as labels."""
    if logits.shape != labels.shape:
        raise ValueError(
            f"needs a number for each output; outputs have shape {logits.shape}, labels "
            f"{labels.shape}"
        )
    return logits - labels


@component("metric")
class MeanAbsoluteError(NumberMetric):
    """Mean absolute error, in the units of the data; the mean over several numbers."""

    name: Literal["mae"] = "mae"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        return self._sum_errors(abs(_subtract(logits, labels)), mask)

    def value(self, sums: Any) -> float:
        errors = np.asarray(sums["errors"], np.float64) / float(sums["samples"])
        return self._average_in_data_units(errors)


@component("metric")
class RootMeanSquareError(NumberMetric):
    """Root of the mean squared error, in the units of the data; the mean over several numbers."""

    name: Literal["rmse"] = "rmse"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        return self._sum_errors(jnp.square(_subtract(logits, labels)), mask)

    def value(self, sums: Any) -> float:
        squares = np.asarray(sums["errors"], np.float64) / float(sums["samples"])
        return self._average_in_data_units(np.sqrt(squares))


@component("metric")
class ExplainedShare(NumberMetric):
    """R squared: 1 - squared error / squared deviation from the mean of the evaluated samples. The
    mean over several numbers; a constant number counts as 0."""

    better: ClassVar[Direction] = "max"
    name: Literal["r2"] = "r2"

    def zero(self, classes: int) -> Any:
        """Return sums of squared errors, of numbers and of their squares, float32 (K,) each."""
        zeros = np.zeros(classes, np.float32)
        return {**super().zero(classes), "total": zeros, "squares": zeros}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        valid = jnp.where(mask[:, None], labels, 0)
        return {
            **self._sum_errors(jnp.square(_subtract(logits, labels)), mask),
            "total": valid.sum(axis=0),
            "squares": jnp.square(valid).sum(axis=0),
        }

    def value(self, sums: Any) -> float:
        errors, total, squares = (
            np.asarray(sums[key], np.float64) for key in ("errors", "total", "squares")
        )
        spread = squares - total**2 / float(sums["samples"])
        shares = 1 - np.divide(errors, spread, out=np.ones_like(errors), where=spread > 0)
        return float(shares.mean())


class MultiLabelMetric(MetricSpec):
    """Base of the metrics of K labels, any number of which a sample may have."""

    def zero(self, classes: int) -> Any:
        """Return counts by label, int32 (K,): of hits, labels and predictions. Also the number of
        samples whose labels are all right, and of all samples."""
        zeros = np.zeros(classes, np.int32)
        counts = {"hits": zeros, "actual": zeros, "predicted": zeros}
        return {**counts, "exact": np.zeros((), np.int32), "samples": np.zeros((), np.int32)}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        predicted = (logits > 0) & mask[:, None]
        actual = (labels > 0.5) & mask[:, None]
        exact = (predicted == actual).all(axis=-1) & mask
        counted = {"hits": predicted & actual, "actual": actual, "predicted": predicted}
        counted |= {"exact": exact, "samples": mask}
        return {key: value.sum(axis=0, dtype=jnp.int32) for key, value in counted.items()}


@component("metric")
class ExactMatch(MultiLabelMetric):
    """The share of samples whose labels are all predicted right."""

    name: Literal["exact_match"] = "exact_match"

    def value(self, sums: Any) -> float:
        return float(sums["exact"] / sums["samples"])


@component("metric")
class MicroF1(MultiLabelMetric):
    """F1 of the labels of all samples together."""

    name: Literal["micro_f1"] = "micro_f1"

    def value(self, sums: Any) -> float:
        totals = int(sums["actual"].sum()) + int(sums["predicted"].sum())
        return 2 * int(sums["hits"].sum()) / totals if totals else 0.0


@component("metric")
class MacroF1(MultiLabelMetric):
    """The mean of the F1 of each label; 0 for a label without samples and predictions."""

    name: Literal["macro_f1"] = "macro_f1"

    def value(self, sums: Any) -> float:
        totals = np.asarray(sums["actual"] + sums["predicted"], np.float64)
        f1 = np.divide(2.0 * sums["hits"], totals, out=np.zeros_like(totals), where=totals > 0)
        return float(f1.mean())


class TokenMetric(MetricSpec):
    """Base of the metrics for networks that predict a token at each position."""

    ignore_index: int | None = None
    """The label of positions that don't count; null: all count."""

    def zero(self, classes: int) -> Any:
        """Return the sum of the tokens' values, float32 (), and the number of tokens, int32 ()."""
        return {"total": np.zeros((), np.float32), "tokens": np.zeros((), np.int32)}

    def _sum_values(self, values: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Return the sum of values (B, ...) over the valid tokens, and their number."""
        import jax.numpy as jnp

        valid = mask.reshape(-1, *(1,) * (labels.ndim - 1))
        if self.ignore_index is not None:
            valid = valid & (labels.astype(jnp.int32) != self.ignore_index)
        valid = jnp.broadcast_to(valid, labels.shape)
        total = jnp.where(valid, values, 0).sum(dtype=jnp.float32)
        return {"total": total, "tokens": valid.sum(dtype=jnp.int32)}


@component("metric")
class TokenAccuracy(TokenMetric):
    """The share of tokens that the network predicts as the most probable."""

    name: Literal["token_accuracy"] = "token_accuracy"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        return self._sum_values(logits.argmax(axis=-1) == labels, labels, mask)

    def value(self, sums: Any) -> float:
        return float(sums["total"] / sums["tokens"])


@component("metric")
class Perplexity(TokenMetric):
    """Exponential of the mean cross-entropy of tokens, for any loss; infinite for a mean above 700,
    as float64 overflows above 709."""

    better: ClassVar[Direction] = "min"
    name: Literal["perplexity"] = "perplexity"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax
        import jax.numpy as jnp

        places = labels.astype(jnp.int32).clip(0, logits.shape[-1] - 1)[..., None]
        true_logits = jnp.take_along_axis(logits, places, axis=-1)[..., 0]
        return self._sum_values(jax.nn.logsumexp(logits, axis=-1) - true_logits, labels, mask)

    def value(self, sums: Any) -> float:
        mean = float(sums["total"]) / int(sums["tokens"])
        return math.inf if mean > 700 else math.exp(mean)


def list_metrics(targets: Targets, ignore_index: int | None = None) -> Sequence[MetricSpec]:
    """Return the metrics of every evaluation of these targets, except the metrics of classes.

    Labels equal to `ignore_index` don't count.
    """
    match targets.task:
        case "regression":
            std = targets.std
            return MeanAbsoluteError(std=std), RootMeanSquareError(std=std), ExplainedShare(std=std)
        case "multi_label":
            return ExactMatch(), MicroF1(), MacroF1()
        case "next_token":
            return TokenAccuracy(ignore_index=ignore_index), Perplexity(ignore_index=ignore_index)
    return ()


class ClassCountMetric(MetricSpec):
    """Base of the metrics of class labels, one per sample or one per position.

    Labels outside the classes, and labels equal to `ignore_index`, don't count.
    """

    ignore_index: int | None = None
    """The label that doesn't count; null: dataset.ignore_index."""

    def ignoring(self, label: int | None) -> Self:
        if self.ignore_index is not None:
            return self
        return self.model_copy(update={"ignore_index": label})

    def zero(self, classes: int) -> Any:
        """Return counts by class, int32 (C,): labels predicted right, labels, predictions."""
        zeros = np.zeros(classes, np.int32)
        return {"hits": zeros, "actual": zeros, "predicted": zeros}

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
            # The last entry collects what doesn't count.
            place = jnp.where(where, indices, classes).ravel()
            return jnp.zeros(classes + 1, jnp.int32).at[place].add(1)[:classes]

        return {
            "hits": count(labels, valid & (labels == predicted)),
            "actual": count(labels, valid),
            "predicted": count(predicted, valid),
        }


@component("metric")
class MeanIou(ClassCountMetric):
    """Mean intersection over union of the classes that have labels or predictions."""

    name: Literal["mean_iou"] = "mean_iou"

    def value(self, sums: Any) -> float:
        hits, actual, predicted = (
            np.asarray(sums[key], np.float64) for key in ("hits", "actual", "predicted")
        )
        union = actual + predicted - hits
        is_present = union > 0
        return float((hits[is_present] / union[is_present]).mean()) if is_present.any() else 0.0


@component("metric")
class PixelAccuracy(ClassCountMetric):
    """The share of labels that are predicted right, such as the pixels of masks."""

    name: Literal["pixel_accuracy"] = "pixel_accuracy"

    def value(self, sums: Any) -> float:
        count = int(np.asarray(sums["actual"], np.int64).sum())
        return int(np.asarray(sums["hits"], np.int64).sum()) / count if count else 0.0


@component("metric")
class BalancedAccuracy(ClassCountMetric):
    """Mean recall of the classes that have labels: the accuracy if all were equally frequent."""

    name: Literal["balanced_accuracy"] = "balanced_accuracy"

    def value(self, sums: Any) -> float:
        hits, actual = (np.asarray(sums[key], np.float64) for key in ("hits", "actual"))
        is_present = actual > 0
        return float((hits[is_present] / actual[is_present]).mean()) if is_present.any() else 0.0


@component("metric")
class CalibrationError(MetricSpec):
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3), in `bins` equal bins.

    The mean distance between the probability of the predicted class and the share of right
    predictions, over bins of that probability. Samples have one label each.
    """

    better: ClassVar[Direction] = "min"
    name: Literal["calibration_error"] = "calibration_error"
    bins: PositiveInt = 15

    def zero(self, classes: int) -> Any:
        """Return sums by bin, float32 (3, bins): of samples, right predictions, probabilities."""
        return np.zeros((3, self.bins), np.float32)

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax
        import jax.numpy as jnp

        true = find_true_classes(logits, labels)
        probability = jax.nn.softmax(logits).max(axis=-1)
        # Bins include their upper end: 1 belongs to the last bin.
        places = (jnp.ceil(probability * self.bins) - 1).clip(0, self.bins - 1).astype(jnp.int32)
        right = logits.argmax(axis=-1) == true
        values = jnp.stack([jnp.ones_like(probability), right, probability])
        return jnp.zeros((3, self.bins)).at[:, places].add(jnp.where(mask, values, 0))

    def value(self, sums: Any) -> float:
        samples, right, probability = np.asarray(sums, np.float64)
        return float(np.abs(right - probability).sum() / samples.sum())


@component("metric")
class BrierScore(MetricSpec):
    """Brier score (Brier 1950): the squared distance of all probabilities from the true class.

    Samples have one label each, or probabilities as labels. 0 is best, 2 is worst.
    """

    better: ClassVar[Direction] = "min"
    name: Literal["brier"] = "brier"

    def zero(self, classes: int) -> Any:
        """Return the sum of squared distances, and the number of samples, float32 (2,)."""
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


def find_true_classes(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the true class of every sample, int (B,), from integer labels or a value per class.
    Raises ValueError if samples have several labels."""
    import jax.numpy as jnp

    _require_one_label(logits)
    return labels if jnp.issubdtype(labels.dtype, jnp.integer) else labels.argmax(axis=-1)


def _require_one_label(logits: jax.Array) -> None:
    if logits.ndim != 2:
        raise ValueError(f"needs logits (batch, classes); these have shape {logits.shape}")
