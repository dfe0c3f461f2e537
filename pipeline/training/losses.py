"""Losses: one number per sample, and their reduction to the loss of a batch.

A network may predict one of C classes at every position of a sample, such as its tokens or pixels.
Then logits are (B, ..., C), and labels (B, ...) int or (B, ..., C) float. The loss of a sample is
the mean over its valid labels.
"""

from __future__ import annotations

import math
from abc import abstractmethod
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

import numpy as np
from pydantic import Field, NonNegativeFloat, PositiveFloat

from pipeline.core.files.name_text import show_name
from pipeline.core.registry import Expected, Seq, component
from pipeline.data.columns import Targets, Task
from pipeline.training.component_specs import LossSpec, Reduction

if TYPE_CHECKING:
    import jax

    from pipeline.training.step_config import StepConfig

USUAL_LOSSES: Mapping[Task, str] = {
    "classification": "cross_entropy",
    "regression": "mse",
    "multi_label": "binary_cross_entropy",
    "next_token": "cross_entropy",
    "matching": "contrastive",
    "sequence": "ctc",
}
"""The loss that a recipe of each task would usually name."""

SampleLoss = Callable[..., "jax.Array"]
"""(logits, labels, where) -> loss per sample; `where` is passed only with an `ignore_index`."""


@dataclass(frozen=True)
class TrainingObjective:
    """The loss of a batch: a loss of each sample, and how these are reduced."""

    loss: SampleLoss
    reduction: Reduction = "mean"
    ignore_index: int | None = None
    """Label of entries that losses and metrics leave out. If it is set, the loss takes `where`."""


class LabelLoss(LossSpec):
    """Base of the losses that are a mean over the labels of a sample."""

    tasks: ClassVar[tuple[Task, ...]] = (
        "classification",
        "regression",
        "multi_label",
        "next_token",
    )
    masks_labels: ClassVar[bool] = True

    @abstractmethod
    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """Return a function (logits, targets), (B, ..., C) float32 each -> losses (B, ...)."""

    def build(self) -> Callable[..., jax.Array]:
        """Return the loss function (logits, labels, where=None) -> (B,) float32.

        `where`, bool (B, ...), marks the valid labels; None: all are valid. A sample without a
        valid label has loss 0, and logits of invalid labels get no gradient. The function raises
        ValueError for labels whose shape or dtype doesn't fit the logits.
        """
        import jax.numpy as jnp

        from pipeline.training.masks import masked_mean

        label_loss = self.build_each()

        def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
            logits, targets = cast_to_float32(logits, labels)
            if where is None:
                losses = label_loss(logits, targets)
                return losses if losses.ndim == 1 else losses.reshape(len(losses), -1).mean(axis=1)
            logits = jnp.where(where[..., None], logits, 0)
            return masked_mean(label_loss(logits, targets), where, tuple(range(1, where.ndim)))

        return loss


ClassWeights = Annotated[
    Annotated[Seq[PositiveFloat], Field(min_length=1)] | Literal["balanced"] | None,
    Expected("balanced, one number above 0 for each class, or null"),
]


def fit_class_weights(
    weights: tuple[float, ...] | Literal["balanced"], targets: Targets
) -> tuple[float, ...]:
    """Return the weight of each class. Raises ValueError for a wrong number of weights, and for
    `balanced` with a class without training labels."""
    if weights == "balanced":
        class_counts = zip(targets.names, targets.counts, strict=False)
        empty_classes = [show_name(name) for name, count in class_counts if count == 0]
        if not targets.counts:
            empty_classes = ["what is predicted"]
        if empty_classes:
            raise ValueError(f"class_weights = balanced: {empty_classes[0]} has no training label")
        total = sum(targets.counts)
        weights = tuple(total / (len(targets) * count) for count in targets.counts)
    if len(weights) != len(targets):
        raise ValueError(f"class_weights has {len(weights)} values for {targets}")
    return weights


def make_class_weights(
    weights: tuple[float, ...] | Literal["balanced"] | None,
) -> np.ndarray | None:
    """Return fitted weights as float32 (C,); None without weights. Raises ValueError for
    `balanced`, which must be fitted first."""
    if weights is None:
        return None
    if isinstance(weights, str):
        raise ValueError("class_weights = balanced: needs the targets that the loss is fitted to")
    return np.array(weights, np.float32)


class ClassLoss(LabelLoss):
    """Base of the losses of classes, whose weights multiply the loss of each label."""

    tasks: ClassVar[tuple[Task, ...]] = ("classification", "next_token")
    reads_logits: ClassVar[bool] = True
    class_weights: ClassWeights = None
    """The weight of each class. balanced: n / (C n_c) for class c, with n_c of the n training
    labels. Then all classes have the same total weight, and labels have weight 1 on average."""

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


@component("loss")
class CrossEntropy(ClassLoss):
    """Softmax cross-entropy with label smoothing s over C classes.

    Smoothing replaces the 1 and the 0s of a one-hot target: by 1 - s and s / (C - 1) with the
    convention `mindspore`; by 1 - s + s / C and s / C with `uniform`, as in PyTorch, Keras and
    optax. Class weights multiply the loss of each label by the weight of its class. The mean
    divides by the number of labels, as in Keras; PyTorch divides by the sum of the weights.
    """

    name: Literal["cross_entropy"] = "cross_entropy"
    smoothing: Annotated[float, Field(ge=0, lt=1)]
    smoothing_convention: Literal["mindspore", "uniform"]
    z_loss: NonNegativeFloat = 0.0
    """Weight of log(Z)^2, which each label adds, with Z the sum of the exponentials of its logits
    (Chowdhery et al. 2022, "PaLM", sec. 5: 1e-4). It holds log Z near 0. Class weights don't
    multiply it."""

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        import jax.numpy as jnp
        import optax
        from jax.nn import logsumexp

        def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
            classes = logits.shape[-1]
            smoothing = self.smoothing
            if smoothing and self.smoothing_convention == "mindspore":
                if classes < 2:
                    raise ValueError(
                        f"smoothing = {smoothing}: needs at least 2 classes, not {classes}"
                    )
                # Uniform smoothing by this number makes the same targets.
                smoothing = smoothing * classes / (classes - 1)
            smoothed = optax.smooth_labels(targets, smoothing)
            return optax.softmax_cross_entropy(logits, smoothed)

        weights = make_class_weights(self.class_weights)

        def label_loss(logits: jax.Array, targets: jax.Array) -> jax.Array:
            losses = cross_entropy(logits, targets)
            if weights is not None:
                losses = losses * (targets * weights).sum(-1)
            if self.z_loss:
                # Labels outside 0..C-1 have no class, and add nothing, as to the cross-entropy.
                squares = logsumexp(logits, axis=-1) ** 2
                losses = losses + self.z_loss * jnp.where(targets.any(axis=-1), squares, 0)
            return losses

        return label_loss


class OutputLoss(LabelLoss):
    """Base of the losses that are a mean over the C outputs of a sample or position."""

    @abstractmethod
    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        """Return the loss of each output; it and both arguments are (B, ..., C) float32."""

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        return lambda outputs, targets: self.compare(outputs, targets).mean(axis=-1)


@component("loss")
class L1(OutputLoss):
    """Mean absolute error over the C outputs of a sample."""

    name: Literal["l1"] = "l1"

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        return abs(outputs - targets)


@component("loss")
class Mse(OutputLoss):
    """Mean squared error over the C outputs of a sample."""

    name: Literal["mse"] = "mse"

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        import optax

        return optax.squared_error(outputs, targets)


@component("loss")
class Huber(OutputLoss):
    """Huber's loss (1964): e^2 / 2 for errors |e| up to `delta`, and delta |e| - delta^2 / 2 for
    larger errors. The mean over the outputs of a sample."""

    name: Literal["huber"] = "huber"
    delta: PositiveFloat = 1.0

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        import optax

        return optax.huber_loss(outputs, targets, delta=self.delta)


@component("loss")
class Quantile(OutputLoss):
    """The loss that is least if outputs are the q-quantiles of the targets (Koenker and Bassett
    1978).

    With e = target - output it is q e if e is positive, else (q - 1) e. The mean over the outputs
    of a sample.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("regression",)
    name: Literal["quantile"] = "quantile"
    q: Annotated[float, Field(gt=0, lt=1)] = 0.5

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        import jax.numpy as jnp

        errors = targets - outputs
        return jnp.maximum(self.q * errors, (self.q - 1) * errors)


@component("loss")
class BinaryCrossEntropy(OutputLoss):
    """Cross-entropy of the sigmoid of each output, for samples with any number of labels. The mean
    over the outputs of a sample."""

    tasks: ClassVar[tuple[Task, ...]] = ("multi_label",)
    reads_logits: ClassVar[bool] = True
    name: Literal["binary_cross_entropy"] = "binary_cross_entropy"

    def compare(self, outputs: jax.Array, targets: jax.Array) -> jax.Array:
        import optax

        return optax.sigmoid_binary_cross_entropy(outputs, targets)


def cast_to_float32(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Return logits and targets, (B, ..., C) float32. Integer labels become one-hot targets, or
    zeros outside 0..C-1. Raises ValueError for labels whose shape or dtype doesn't fit the
    logits."""
    import jax
    import jax.numpy as jnp

    if labels.shape == logits.shape[:-1] and jnp.issubdtype(labels.dtype, jnp.integer):
        targets = jax.nn.one_hot(labels.astype(jnp.int32), logits.shape[-1], dtype=jnp.float32)
    elif labels.shape == logits.shape and jnp.issubdtype(labels.dtype, jnp.floating):
        targets = labels.astype(jnp.float32)
    else:
        raise ValueError(
            f"labels of shape {labels.shape} and dtype {labels.dtype} do not fit logits of shape "
            f"{logits.shape}; must be integers of shape {logits.shape[:-1]} or floats of "
            f"{logits.shape}"
        )
    return logits.astype(jnp.float32), targets


def make_label_mask(config: StepConfig, labels: jax.Array) -> jax.Array | None:
    """Return a mask of the valid labels, bool (B, ...); None without an `ignore_index`."""
    import jax.numpy as jnp

    if config.objective.ignore_index is None:
        return None
    return labels.astype(jnp.int32) != config.objective.ignore_index


def compute_losses(config: StepConfig, logits: jax.Array, labels: jax.Array) -> jax.Array:
    """Return the loss of each sample, float32 (B,): the mean over its valid labels."""
    where = make_label_mask(config, labels)
    loss = config.objective.loss
    return loss(logits, labels) if where is None else loss(logits, labels, where)


def compute_divisor(
    config: StepConfig, labels: jax.Array, mask: jax.Array, count: jax.Array | int
) -> jax.Array | int:
    """Return the divisor of the mean over a batch: `count`, the number of valid samples, or the
    number of their valid labels.

    With an `ignore_index` every valid label of the batch has the same weight, as in PyTorch's
    `cross_entropy`. If no label is valid, the divisor is 1 and the loss 0; PyTorch's loss is NaN.
    """
    import jax.numpy as jnp

    if not divides_by_labels(config):
        return count
    return jnp.maximum(count_valid_labels(config, labels, mask), 1.0)


def divides_by_labels(config: StepConfig) -> bool:
    """Return whether the mean over a batch is over valid labels. Otherwise it is over samples. With
    reduction `none` it is always over samples: MindSpore's array of losses also has an entry, 0,
    for each sample with an ignored label."""
    return config.objective.ignore_index is not None and config.objective.reduction != "none"


def count_valid_labels(config: StepConfig, labels: jax.Array, mask: jax.Array) -> jax.Array:
    """Return the number of valid labels of valid samples, float32 (). Needs an `ignore_index`."""
    import jax.numpy as jnp

    counts = _count_sample_labels(config, labels)
    assert counts is not None, "callers check divides_by_labels"
    return jnp.sum(jnp.where(mask, counts, 0.0))


def count_batch_labels(
    config: StepConfig, logits: jax.Array, labels: jax.Array, mask: jax.Array
) -> jax.Array:
    """Return the number of valid labels of the valid samples, float32 (): of samples, or of their
    positions if the network predicts at positions."""
    import jax.numpy as jnp

    if config.objective.ignore_index is not None:
        return count_valid_labels(config, labels, mask)
    is_by_sample = config.targets.task in ("regression", "multi_label", "matching", "sequence")
    positions = 1 if is_by_sample else math.prod(logits.shape[1:-1])
    return positions * jnp.sum(mask, dtype=jnp.float32)


class BatchLoss(NamedTuple):
    """The loss of a batch, or a microbatch's or shard's share of it; float32 scalars."""

    minimised: jax.Array
    """The value that is differentiated."""
    reported: jax.Array
    """The loss of the step, which differs from `minimised` only with reduction `none`."""


def reduce_losses(
    config: StepConfig,
    losses: jax.Array,
    labels: jax.Array,
    mask: jax.Array,
    divisor: jax.Array | int,
) -> BatchLoss:
    """Reduce the losses (B,) of the samples that `mask`, bool (B,), marks as valid.

    A mean divides by `divisor`, or if a feature selects samples by the number of selected samples
    or labels. The losses of padding, and of samples without a valid label, may have any value. The
    images of padding may not: a non-finite value in the network reaches the gradients even times 0.
    So padding repeats a valid sample.
    """
    import jax.numpy as jnp

    label_counts = _count_sample_labels(config, labels)
    valid = mask if label_counts is None else mask & (label_counts > 0)
    selectors = config.list_acting("select_samples")
    for feature in selectors:
        valid = feature.select_samples(losses, valid)
    if selectors:
        weights = valid
        if label_counts is not None and divides_by_labels(config):
            weights = jnp.where(valid, label_counts, 0.0)
        divisor = jnp.maximum(jnp.sum(weights, dtype=jnp.float32), 1.0)
    if label_counts is not None and config.objective.reduction == "mean":
        # The divisor is a number of labels, so a sample's loss must be the sum over its labels.
        losses = losses * label_counts
    losses = jnp.where(valid, losses, 0.0)
    total = losses.sum()
    match config.objective.reduction:
        case "sum":
            return BatchLoss(total, total)
        case "none":
            return BatchLoss(total, total / divisor)
        case "mean":
            mean = total / divisor
            return BatchLoss(mean, mean)


def _count_sample_labels(config: StepConfig, labels: jax.Array) -> jax.Array | None:
    """Return the number of valid labels of each sample, float32 (B,); None without an
    `ignore_index`."""
    import jax.numpy as jnp

    where = make_label_mask(config, labels)
    if where is None:
        return None
    return jnp.sum(where, axis=tuple(range(1, where.ndim)), dtype=jnp.float32)
