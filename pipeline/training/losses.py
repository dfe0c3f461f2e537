"""Losses: what is minimised, one number per sample (L-01, L-02).

A network may tell C classes apart at every position of a sample, of tokens or of pixels. Its logits
are (B, ..., C) then and its labels (B, ...) int or (B, ..., C) float; the loss of a sample is the
mean over its positions.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Annotated, Literal

from pydantic import Field

from pipeline.registry import part
from pipeline.training.spec import LossSpec

if TYPE_CHECKING:
    import jax


@part("loss")
class CrossEntropy(LossSpec):
    """Softmax cross-entropy with label smoothing s over C classes.

    A one-hot target becomes, under convention `mindspore`, 1 - s and s / (C - 1) (L-02); under
    `uniform`, which PyTorch, Keras and optax follow, 1 - s + s / C and s / C.
    """

    name: Literal["cross_entropy"] = "cross_entropy"
    smoothing: Annotated[float, Field(ge=0, lt=1)]
    smoothing_convention: Literal["mindspore", "uniform"]

    def build(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The loss function; it raises ValueError on labels whose shape does not fit the logits."""
        import optax

        def cross_entropy(logits: jax.Array, labels: jax.Array) -> jax.Array:
            logits, targets = _as_float32(logits, labels)
            smoothed = optax.smooth_labels(targets, self._uniform_share(logits.shape[-1]))
            return _mean_over_positions(optax.softmax_cross_entropy(logits, smoothed))

        return cross_entropy

    def _uniform_share(self, classes: int) -> float:
        """The weight of the uniform distribution in the smoothed targets."""
        if self.smoothing_convention == "uniform" or self.smoothing == 0:
            return self.smoothing
        if classes < 2:
            raise ValueError(f"label smoothing {self.smoothing} needs 2 classes or more: {classes}")
        return self.smoothing * classes / (classes - 1)


@part("loss")
class L1(LossSpec):
    """Mean absolute error over the C outputs of a sample."""

    name: Literal["l1"] = "l1"

    def build(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The loss function; it raises ValueError on labels whose shape does not fit the logits."""
        import jax.numpy as jnp

        def l1(logits: jax.Array, labels: jax.Array) -> jax.Array:
            outputs, targets = _as_float32(logits, labels)
            return _mean_over_positions(jnp.mean(jnp.abs(outputs - targets), axis=-1))

        return l1


@part("loss")
class Mse(LossSpec):
    """Mean squared error over the C outputs of a sample."""

    name: Literal["mse"] = "mse"

    def build(self) -> Callable[[jax.Array, jax.Array], jax.Array]:
        """The loss function; it raises ValueError on labels whose shape does not fit the logits."""
        import jax.numpy as jnp
        import optax

        def mse(logits: jax.Array, labels: jax.Array) -> jax.Array:
            errors = optax.squared_error(*_as_float32(logits, labels))
            return _mean_over_positions(jnp.mean(errors, axis=-1))

        return mse


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
