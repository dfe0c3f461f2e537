"""Metrics for numbers, classes, several labels per sample, next tokens and probabilities."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Self

import numpy as np
from pydantic import PositiveFloat, PositiveInt

from pipeline.core.registry import Seq, component
from pipeline.data.columns import Targets
from pipeline.training.component_specs import Direction, MetricSpec

if TYPE_CHECKING:
    import jax

NUMBER_METRICS = ("mae", "relative_mae", "rmse", "r2")
LABEL_METRICS = ("exact_match", "micro_f1", "macro_f1")
TOKEN_METRICS = ("token_accuracy", "perplexity")
MATCH_METRICS = ("recall_at_1", "recall_at_5", "recall_at_10")
"""The metrics in `list_metrics` for numbers, several labels per sample, tokens and pairs."""


class NumberMetric(MetricSpec):
    """Base of the metrics of networks that predict K numbers, which may be standardised."""

    better: ClassVar[Direction] = "min"
    std: Seq[float] = ()
    """Standard deviation of each number, in the units of the data; empty: not standardised."""

    def zero(self, classes: int) -> Any:
        """Return zeros for the sums of absolute or squared errors, float32 (K,), and for the number
        of samples."""
        return {"errors": np.zeros(classes, np.float32), "samples": np.zeros((), np.float32)}

    def _sum_errors(self, errors: jax.Array, mask: jax.Array) -> dict[str, jax.Array]:
        """Return sums of errors (B, K) over valid samples, and the number of samples."""
        import jax.numpy as jnp

        valid = jnp.where(mask[:, None], errors, 0)
        return {"errors": valid.sum(axis=0), "samples": mask.sum().astype(jnp.float32)}

    def _average_in_data_units(self, errors: np.ndarray) -> float:
        """Return the mean of the K errors, float64 (K,), after their conversion to the units of the
        data."""
        units = np.asarray(self.std, np.float64) if self.std else np.ones(len(errors))
        return float((errors * units).mean())


def _subtract(logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the errors (B, K). Raises ValueError if logits and labels have different shapes."""
    if logits.shape != labels.shape:
        raise ValueError(
            f"needs a number for each output; outputs have shape {logits.shape}, labels "
            f"{labels.shape}"
        )
    return logits - labels


class AbsoluteErrorMetric(NumberMetric):
    """Base of the metrics of absolute errors."""

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        return self._sum_errors(abs(_subtract(logits, labels)), mask)

    def value(self, sums: Any) -> float:
        errors = np.asarray(sums["errors"], np.float64) / float(sums["samples"])
        return self._average_in_data_units(errors)


@component("metric")
class MeanAbsoluteError(AbsoluteErrorMetric):
    """Mean absolute error in the units of the data, averaged over the K numbers."""

    name: Literal["mae"] = "mae"


@component("metric")
class RelativeError(AbsoluteErrorMetric):
    """Mean absolute error as a share of a naive forecast's on the same samples. Below 1 the
    network is better."""

    name: Literal["relative_mae"] = "relative_mae"
    naive_mae: PositiveFloat
    """Mean absolute error of the naive forecast, in the units of the data."""

    def value(self, sums: Any) -> float:
        return super().value(sums) / self.naive_mae


@component("metric")
class RootMeanSquareError(NumberMetric):
    """Root of the mean squared error in the units of the data, averaged over the K numbers."""

    name: Literal["rmse"] = "rmse"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        return self._sum_errors(jnp.square(_subtract(logits, labels)), mask)

    def value(self, sums: Any) -> float:
        squares = np.asarray(sums["errors"], np.float64) / float(sums["samples"])
        return self._average_in_data_units(np.sqrt(squares))


@component("metric")
class ExplainedShare(NumberMetric):
    """R squared: 1 - squared error / squared deviation from the mean of the evaluated samples,
    averaged over the K numbers. It is 0 for a number that deviates by less than a thousandth."""

    better: ClassVar[Direction] = "max"
    name: Literal["r2"] = "r2"

    def zero(self, classes: int) -> Any:
        """Return zeros for the sums of squared errors, of numbers and of their squares, float32
        (K,) each, and for the number of samples."""
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
        names = ("errors", "total", "squares")
        errors, total, squares = (np.asarray(sums[name], np.float64) for name in names)
        deviations = squares - total**2 / float(sums["samples"])
        varies = deviations > 1e-6 * squares  # Less is the rounding of float32.
        ratios = np.divide(errors, deviations, out=np.ones_like(errors), where=varies)
        return float((1 - ratios).mean())


class MultiLabelMetric(MetricSpec):
    """Base of the metrics of K labels, if a sample may have any number of them."""

    def zero(self, classes: int) -> Any:
        """Return zeros for the numbers of hits, labels and predictions of each label, int32 (K,),
        of samples whose labels are all predicted right, and of samples, int32 ()."""
        zero = np.zeros((), np.int32)
        zeros = np.zeros(classes, np.int32)
        counts = {"hits": zeros, "actual": zeros, "predicted": zeros}
        return {**counts, "exact": zero, "samples": zero}

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax.numpy as jnp

        predicted = (logits > 0) & mask[:, None]
        actual = (labels > 0.5) & mask[:, None]
        masks = {
            "hits": predicted & actual,
            "actual": actual,
            "predicted": predicted,
            "exact": (predicted == actual).all(axis=-1) & mask,
            "samples": mask,
        }
        return {key: value.sum(axis=0, dtype=jnp.int32) for key, value in masks.items()}


@component("metric")
class ExactMatch(MultiLabelMetric):
    """The share of samples whose labels are all predicted right."""

    name: Literal["exact_match"] = "exact_match"

    def value(self, sums: Any) -> float:
        return float(sums["exact"] / sums["samples"])


@component("metric")
class MicroF1(MultiLabelMetric):
    """F1 from the hits, labels and predictions of all K labels together."""

    name: Literal["micro_f1"] = "micro_f1"

    def value(self, sums: Any) -> float:
        totals = int(sums["actual"].sum()) + int(sums["predicted"].sum())
        return 2 * int(sums["hits"].sum()) / totals if totals else 0.0


@component("metric")
class MacroF1(MultiLabelMetric):
    """The mean of the F1s of the K labels. A label without samples and predictions has an F1 of
    0."""

    name: Literal["macro_f1"] = "macro_f1"

    def value(self, sums: Any) -> float:
        totals = np.asarray(sums["actual"] + sums["predicted"], np.float64)
        f1 = np.divide(2.0 * sums["hits"], totals, out=np.zeros_like(totals), where=totals > 0)
        return float(f1.mean())


class TokenMetric(MetricSpec):
    """Base of the metrics for networks that predict a token at each position."""

    ignore_index: int | None = None
    """The label of positions that are left out; null: none is."""

    def zero(self, classes: int) -> Any:
        """Return zeros for the sum of the tokens' values, float32 (), and for the number of tokens,
        int32 ()."""
        return {"total": np.zeros((), np.float32), "tokens": np.zeros((), np.int32)}

    def _sum_values(self, values: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        """Return the sum of values (B, ...) over the valid tokens, and the number of these
        tokens."""
        import jax.numpy as jnp

        valid = jnp.expand_dims(mask, range(1, labels.ndim))
        if self.ignore_index is not None:
            valid = valid & (labels.astype(jnp.int32) != self.ignore_index)
        valid = jnp.broadcast_to(valid, labels.shape)
        total = jnp.where(valid, values, 0).sum(dtype=jnp.float32)
        return {"total": total, "tokens": valid.sum(dtype=jnp.int32)}


@component("metric")
class TokenAccuracy(TokenMetric):
    """The share of positions whose token has the highest logit."""

    name: Literal["token_accuracy"] = "token_accuracy"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        return self._sum_values(logits.argmax(axis=-1) == labels, labels, mask)

    def value(self, sums: Any) -> float:
        return float(sums["total"] / sums["tokens"])


@component("metric")
class Perplexity(TokenMetric):
    """Exponential of the mean cross-entropy of tokens, also if another loss is minimised. It is
    infinite for a mean above 700, since float64 overflows above 709."""

    better: ClassVar[Direction] = "min"
    name: Literal["perplexity"] = "perplexity"

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax
        import jax.numpy as jnp

        tokens = labels.astype(jnp.int32).clip(0, logits.shape[-1] - 1)
        true_logits = jnp.take_along_axis(logits, tokens[..., None], axis=-1)[..., 0]
        entropies = jax.nn.logsumexp(logits, axis=-1) - true_logits
        return self._sum_values(entropies, labels, mask)

    def value(self, sums: Any) -> float:
        mean = float(sums["total"]) / int(sums["tokens"])
        return math.inf if mean > 700 else math.exp(mean)


def list_metrics(targets: Targets, ignore_index: int | None = None) -> Sequence[MetricSpec]:
    """Return the metrics of every evaluation with these targets, except the metrics of classes.
    They leave out labels equal to `ignore_index`."""
    match targets.task:
        case "matching":
            # Imported here, since few networks match pairs.
            from pipeline.training.contrastive import RecallAt1, RecallAt5, RecallAt10

            return RecallAt1(), RecallAt5(), RecallAt10()
        case "regression":
            std = targets.std
            naive_mae = targets.naive_mae
            relative = () if naive_mae is None else (RelativeError(std=std, naive_mae=naive_mae),)
            return (
                MeanAbsoluteError(std=std),
                *relative,
                RootMeanSquareError(std=std),
                ExplainedShare(std=std),
            )
        case "multi_label":
            return ExactMatch(), MicroF1(), MacroF1()
        case "sequence":
            from pipeline.training.sequences import LabelErrorRate

            return (LabelErrorRate(),)
        case "next_token":
            return TokenAccuracy(ignore_index=ignore_index), Perplexity(ignore_index=ignore_index)
    return ()


class ClassCountMetric(MetricSpec):
    """Base of the metrics of class labels, one per sample or one per position. Labels outside the
    classes, and labels equal to `ignore_index`, are left out."""

    ignore_index: int | None = None
    """The label that is left out; null: dataset.ignore_index."""

    def ignore_label(self, label: int | None) -> Self:
        if self.ignore_index is not None:
            return self
        return self.model_copy(update={"ignore_index": label})

    def zero(self, classes: int) -> Any:
        """Return zeros for the numbers of labels predicted right, labels and predictions by class,
        int32 (C,) each."""
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
        valid &= jnp.expand_dims(mask, range(1, labels.ndim))
        if self.ignore_index is not None:
            valid &= labels != self.ignore_index

        def count(indices: jax.Array, where: jax.Array) -> jax.Array:
            # Invalid labels are counted in one more entry, which is dropped.
            indices = jnp.where(where, indices, classes).ravel()
            return jnp.zeros(classes + 1, jnp.int32).at[indices].add(1)[:classes]

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
        hits = np.asarray(sums["hits"], np.float64)
        union = np.asarray(sums["actual"], np.float64) + np.asarray(sums["predicted"], np.float64)
        return _average_present(hits, union - hits)


@component("metric")
class PixelAccuracy(ClassCountMetric):
    """The share of labels that are predicted right, such as the pixels of masks."""

    name: Literal["pixel_accuracy"] = "pixel_accuracy"

    def value(self, sums: Any) -> float:
        count = int(np.asarray(sums["actual"], np.int64).sum())
        return int(np.asarray(sums["hits"], np.int64).sum()) / count if count else 0.0


@component("metric")
class BalancedAccuracy(ClassCountMetric):
    """Mean recall of the classes that have labels."""

    name: Literal["balanced_accuracy"] = "balanced_accuracy"

    def value(self, sums: Any) -> float:
        hits = np.asarray(sums["hits"], np.float64)
        return _average_present(hits, np.asarray(sums["actual"], np.float64))


def _average_present(parts: np.ndarray, wholes: np.ndarray) -> float:
    """Return the mean of part / whole over the classes whose whole is above 0; 0 if there is
    none."""
    is_present = wholes > 0
    return float((parts[is_present] / wholes[is_present]).mean()) if is_present.any() else 0.0


@component("metric")
class CalibrationError(MetricSpec):
    """Expected calibration error (Guo et al. 2017, arXiv 1706.04599, eq. 3).

    Samples are put into `bins` bins of equal width by the probability of their predicted class. The
    error is the distance between the mean probability and the share of right predictions in a bin,
    averaged over samples. Each sample has one label.
    """

    better: ClassVar[Direction] = "min"
    name: Literal["calibration_error"] = "calibration_error"
    bins: PositiveInt = 15

    def zero(self, classes: int) -> Any:
        """Return zeros for each bin's number of samples, number of right predictions, and sum of
        probabilities, float32 (3, bins)."""
        return np.zeros((3, self.bins), np.float32)

    def sums(self, logits: jax.Array, labels: jax.Array, mask: jax.Array) -> Any:
        import jax
        import jax.numpy as jnp

        _require_one_label(logits)
        is_class = jnp.issubdtype(labels.dtype, jnp.integer)
        true = labels if is_class else labels.argmax(axis=-1)
        probability = jax.nn.softmax(logits).max(axis=-1)
        # Bins include their upper end: 1 belongs to the last bin.
        bin_numbers = (jnp.ceil(probability * self.bins) - 1).clip(0, self.bins - 1)
        is_right = logits.argmax(axis=-1) == true
        values = jnp.where(mask, jnp.stack([jnp.ones_like(probability), is_right, probability]), 0)
        return jnp.zeros((3, self.bins)).at[:, bin_numbers.astype(jnp.int32)].add(values)

    def value(self, sums: Any) -> float:
        samples, right, probability = np.asarray(sums, np.float64)
        return float(np.abs(right - probability).sum() / samples.sum())


@component("metric")
class BrierScore(MetricSpec):
    """Brier score (Brier 1950): the mean squared distance between the vectors of predicted
    probabilities and of labels, which are one-hot or probabilities. 0 is best, 2 is worst."""

    better: ClassVar[Direction] = "min"
    name: Literal["brier"] = "brier"

    def zero(self, classes: int) -> Any:
        """Return zeros for the sum of squared distances and the number of samples, float32 (2,)."""
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


def _require_one_label(logits: jax.Array) -> None:
    if logits.ndim != 2:
        raise ValueError(f"needs logits (batch, classes); these have shape {logits.shape}")
