"""Losses: what is minimised, one number per sample (L-01, L-02).

A network may tell C classes apart at every position of a sample, of tokens or of pixels. Its logits
are (B, ..., C) then and its labels (B, ...) int or (B, ..., C) float; the loss of a sample is the
mean over its positions, or over those that count.
"""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, ClassVar, Literal

from pydantic import Field

from pipeline.registry import part
from pipeline.training.part_specs import LossSpec

if TYPE_CHECKING:
    import jax


class LabelLoss(LossSpec):
    """Base of the losses to which every label of a sample adds on its own."""

    masks_labels: ClassVar[bool] = True

    @abstractmethod
    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """A function (logits, targets), both (B, ..., C) float32 -> loss of each label (B, ...)."""

    def build(self) -> Callable[..., jax.Array]:
        """The loss function (logits, labels, where=None) -> (B,).

        `where` is bool (B, ...) like integer labels: those that count. A sample of which none does
        has loss 0, and logits where none counts get no gradient, whatever they are. The function
        raises ValueError on labels whose shape does not fit the logits.
        """
        import jax.numpy as jnp

        from pipeline.training.masks import masked_mean

        each = self.build_each()

        def loss(logits: jax.Array, labels: jax.Array, where: jax.Array | None = None) -> jax.Array:
            logits, targets = _as_float32(logits, labels)
            if where is None:
                return _mean_over_positions(each(logits, targets))
            logits = jnp.where(where[..., None], logits, 0)
            return masked_mean(each(logits, targets), where, tuple(range(1, where.ndim)))

        return loss


@part("loss")
class CrossEntropy(LabelLoss):
    """Softmax cross-entropy with label smoothing s over C classes.

    A one-hot target becomes, under convention `mindspore`, 1 - s and s / (C - 1) (L-02); under
    `uniform`, which PyTorch, Keras and optax follow, 1 - s + s / C and s / C.
    """

    name: Literal["cross_entropy"] = "cross_entropy"
    smoothing: Annotated[float, Field(ge=0, lt=1)]
    smoothing_convention: Literal["mindspore", "uniform"]

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        import optax

        def cross_entropy(logits: jax.Array, targets: jax.Array) -> jax.Array:
            smoothed = optax.smooth_labels(targets, self._uniform_share(logits.shape[-1]))
            return optax.softmax_cross_entropy(logits, smoothed)

        return cross_entropy

    def _uniform_share(self, classes: int) -> float:
        """The weight of the uniform distribution in the smoothed targets."""
        if self.smoothing_convention == "uniform" or self.smoothing == 0:
            return self.smoothing
        if classes < 2:
            raise ValueError(f"label smoothing {self.smoothing} needs 2 classes or more: {classes}")
        return self.smoothing * classes / (classes - 1)


@part("loss")
class L1(LabelLoss):
    """Mean absolute error over the C outputs of a sample."""

    name: Literal["l1"] = "l1"

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        import jax.numpy as jnp

        return lambda outputs, targets: jnp.mean(jnp.abs(outputs - targets), axis=-1)


@part("loss")
class Mse(LabelLoss):
    """Mean squared error over the C outputs of a sample."""

    name: Literal["mse"] = "mse"

    def build_each(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        import jax.numpy as jnp
        import optax

        return lambda outputs, targets: jnp.mean(optax.squared_error(outputs, targets), axis=-1)


def _mean_over_positions(losses: jax.Array) -> jax.Array:
    """The loss of every sample (B,) from that of its positions, (B, ...)."""
    return losses if losses.ndim == 1 else losses.reshape(losses.shape[0], -1).mean(axis=1)


def _as_float32(logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Logits and targets, both (B, ..., C) float32; a class outside 0..C-1 has a target of 0s."""
    import jax
    import jax.numpy as jnp

    *positions, classes = logits.shape
    if labels.shape == (*positions,) and jnp.issubdtype(labels.dtype, jnp.integer):
        targets = jax.nn.one_hot(labels.astype(jnp.int32), classes, dtype=jnp.float32)
    elif labels.shape == logits.shape and jnp.issubdtype(labels.dtype, jnp.floating):
        targets = labels.astype(jnp.float32)
    else:
        raise ValueError(
            f"labels of shape {labels.shape} and dtype {labels.dtype} do not fit logits of shape "
            f"{logits.shape}; give integers of shape {(*positions,)} or floats of {logits.shape}"
        )
    return logits.astype(jnp.float32), targets
