"""Losses for some targets: unbalanced labels, masks, and classes in an order.

Focal losses count easy labels less (Lin et al. 2017, "Focal Loss for Dense Object Detection"). The
loss of a label is its cross-entropy times (1 - p)^gamma, with p the predicted probability of what
is true. Soft targets get the sum over what may be true, weighted by the targets. So the loss of
labels that are mixed by lambda is the same mixture of their losses.

Losses of masks compare areas, so a small object counts as much as a large one. A network predicts a
class at every position of a sample, such as its pixels: logits (B, ..., C) and labels (B, ...) int.
Areas are compared within each sample, over its valid labels, so the loss of a sample doesn't depend
on its batch.

In the loss of classes in an order, such as grades, far errors cost more than near ones.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal, NamedTuple, Self

from pydantic import Field, NonNegativeFloat, PositiveFloat

from pipeline.core.registry import component
from pipeline.data.columns import Targets, Task
from pipeline.training.component_specs import LossSpec
from pipeline.training.losses import (
    ClassLoss,
    CrossEntropy,
    LabelLoss,
    OutputLoss,
    cast_to_float32,
    make_class_weights,
)

if TYPE_CHECKING:
    import jax


@component("loss")
class Focal(ClassLoss):
    """Softmax cross-entropy of each label, times (1 - p)^gamma for probability p of its class.

    `gamma` 0 is cross-entropy. Class weights, the paper's alpha, multiply the loss of each class.
    The mean divides by the number of labels.
    """

    name: Literal["focal"] = "focal"
    gamma: NonNegativeFloat = 2.0

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


class Areas(NamedTuple):
    """Predicted and true areas of each class of samples with P positions."""

    shares: jax.Array
    """The softmax of the logits, float32 (B, P, C); 0 at positions without a valid label."""
    truth: jax.Array
    """1 for the class of a position, else 0; float32 (B, P, C), 0 without a valid label."""
    valid: jax.Array
    """Mask of the valid labels, bool (B, P)."""


def read_areas(logits: jax.Array, labels: jax.Array, where: jax.Array | None) -> Areas:
    """Return the areas of logits (B, ..., C) and labels (B, ...) int. `where`, bool (B, ...), marks
    the valid labels; None: all are valid. Raises ValueError for samples with one label, soft
    labels, and labels that don't fit the logits."""
    import jax.numpy as jnp
    from jax.nn import softmax

    if not jnp.issubdtype(labels.dtype, jnp.integer):
        raise ValueError(
            f"labels of {labels.dtype} are soft or one-hot, and areas need whole numbers, one "
            "for each position; leave out one_hot, mix_up and cut_mix, or choose another loss"
        )
    if logits.ndim < 3:
        raise ValueError(
            f"logits of shape {logits.shape} and labels of shape {labels.shape} have no positions, "
            "such as pixels, and losses of areas need masks; choose another loss"
        )
    logits, truth = cast_to_float32(logits, labels)
    valid = jnp.ones(labels.shape, bool) if where is None else where
    shares = softmax(jnp.where(valid[..., None], logits, 0), axis=-1)
    batch, classes = len(logits), logits.shape[-1]
    valid = valid.reshape(batch, -1)
    shares, truth = (array.reshape(batch, -1, classes) for array in (shares, truth))
    shares, truth = (jnp.where(valid[..., None], array, 0) for array in (shares, truth))
    return Areas(shares, truth, valid)


class AreaLoss(LossSpec):
    """Base of the losses of a sample's areas."""

    tasks: ClassVar[tuple[Task, ...]] = ("classification",)
    masks_labels: ClassVar[bool] = True
    reads_logits: ClassVar[bool] = True

    @abstractmethod
    def compare(self, areas: Areas) -> jax.Array:
        """Return the loss of each sample, float32 (B,); 0 for one without a valid label."""

    def build(self) -> Callable[..., jax.Array]:
        """Return the loss function (logits, labels, where=None) -> (B,) float32. It raises
        ValueError as `read_areas` does."""

        def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
            return self.compare(read_areas(logits, labels, where))

        return loss


@component("loss")
class Dice(AreaLoss):
    """1 minus the Dice coefficient, the mean over the classes (Isensee et al. 2021).

    The coefficient of a class is (2 sum(p g) + smooth) / (sum(p) + sum(g) + smooth) over the
    positions of a sample, with p the softmax and g the truth.
    """

    name: Literal["dice"] = "dice"
    smooth: PositiveFloat = 1.0
    """Number of positions that each area has in addition. So a class that is neither there nor
    predicted has coefficient 1."""
    background: bool = True
    """Whether the mean includes class 0."""

    def fit_to_targets(self, targets: Targets) -> Self:
        """Return the loss. Raises ValueError if no class besides the background remains."""
        _require_foreground(self.background, targets)
        return self

    def compare(self, areas: Areas) -> jax.Array:
        return _compute_dice_losses(areas, self.smooth, self.background)


@component("loss")
class DiceCrossEntropy(CrossEntropy):
    """Cross-entropy plus `dice_weight` times Dice: nnU-Net's with background: false, smooth: 1e-5
    (Isensee et al. 2021).

    Smoothing and class weights are of the cross-entropy alone.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification",)
    name: Literal["dice_cross_entropy"] = "dice_cross_entropy"  # type: ignore[assignment]
    dice_weight: NonNegativeFloat = 1.0
    smooth: PositiveFloat = 1.0
    """As in `Dice`."""
    background: bool = True
    """Whether Dice's mean includes class 0."""

    def fit_to_targets(self, targets: Targets) -> Self:
        """Return the loss with a number for each class in place of `balanced`. Raises ValueError as
        `CrossEntropy` and `Dice` do."""
        _require_foreground(self.background, targets)
        return super().fit_to_targets(targets)

    def build(self) -> Callable[..., jax.Array]:
        cross_entropy = super().build()

        def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
            areas = read_areas(logits, labels, where)
            dice = _compute_dice_losses(areas, self.smooth, self.background)
            return cross_entropy(logits, labels, where) + self.dice_weight * dice

        return loss


def _require_foreground(background: bool, targets: Targets) -> None:
    if not background and len(targets) < 2:
        raise ValueError(f"background = false: needs at least 2 classes, not {len(targets)}")


def _compute_dice_losses(areas: Areas, smooth: float, background: bool) -> jax.Array:
    """Return 1 minus the Dice coefficient of each sample, float32 (B,); see `Dice`."""
    shares, truth = (array[..., 0 if background else 1 :] for array in areas[:2])
    overlaps = (shares * truth).sum(axis=1)
    sizes = shares.sum(axis=1) + truth.sum(axis=1)
    return ((sizes - 2 * overlaps) / (sizes + smooth)).mean(axis=-1)


@component("loss")
class LovaszSoftmax(AreaLoss):
    """Lovász extension of 1 minus intersection over union, the mean over the classes that a sample
    has (Berman et al. 2018).

    With the errors |g - p| of a class in falling order, each is weighted by how much the loss
    grows if the positions up to it are wrong.
    """

    name: Literal["lovasz_softmax"] = "lovasz_softmax"

    def compare(self, areas: Areas) -> jax.Array:
        import jax
        import jax.numpy as jnp

        errors = jnp.where(areas.valid[..., None], abs(areas.truth - areas.shares), -1)
        # Invalid labels come last, with an error of 0.
        negated, truth = jax.lax.sort((-errors, areas.truth), dimension=1, num_keys=1)
        errors = jnp.maximum(-negated, 0)
        sizes = truth.sum(axis=1, keepdims=True)
        intersections = sizes - jnp.cumsum(truth, axis=1)
        unions = sizes + jnp.cumsum(1 - truth, axis=1)
        # The growth from one position to the next, without a difference of close numbers.
        growth = jnp.where(truth > 0, 1, intersections / jnp.maximum(unions - 1, 1)) / unions
        losses = (errors * jax.lax.stop_gradient(growth)).sum(axis=1)
        is_present = sizes[:, 0] > 0
        present = jnp.maximum(is_present.sum(axis=-1), 1)
        return jnp.where(is_present, losses, 0).sum(axis=-1) / present


@component("loss")
class Ordinal(LabelLoss):
    """Mean over the C - 1 thresholds of the binary cross-entropy of whether the class is above.

    These are the binary tasks of ordinal regression (Niu et al. 2016, Cao et al. 2020). The
    probability of classes above a threshold is the sum of their softmax, so it can't rise with the
    threshold, and a network has C outputs as with cross-entropy, which is this loss for 2 classes.
    The classes have the order of their names in the dataset. Soft targets are a distribution.
    """

    tasks: ClassVar[tuple[Task, ...]] = ("classification",)
    reads_logits: ClassVar[bool] = True
    name: Literal["ordinal"] = "ordinal"

    def fit_to_targets(self, targets: Targets) -> Self:
        """Return the loss. Raises ValueError for a single class, which has no threshold."""
        if len(targets) < 2:
            raise ValueError(f"needs at least 2 classes, not {len(targets)}")
        return self

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        import jax.numpy as jnp
        from jax.lax import cumlogsumexp
        from jax.nn import log_softmax

        def ordinal(logits: jax.Array, targets: jax.Array) -> jax.Array:
            axis = logits.ndim - 1
            log_shares = log_softmax(logits, axis=axis)
            log_up_to = cumlogsumexp(log_shares, axis=axis)[..., :-1]
            log_above = cumlogsumexp(log_shares, axis=axis, reverse=True)[..., 1:]
            up_to = jnp.cumsum(targets, axis=axis)[..., :-1]
            above = targets.sum(axis=axis, keepdims=True) - up_to
            return -(up_to * log_up_to + above * log_above).mean(axis=axis)

        return ordinal
