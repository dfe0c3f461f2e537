"""The loss of classes in an order, such as grades: far errors cost more than near ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal, Self

from pipeline.core.registry import component
from pipeline.data.targets import Targets, Task
from pipeline.training.losses import LabelLoss

if TYPE_CHECKING:
    import jax


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
