"""Masked arrays, in place of shapes that depend on values, under jit.

The number of positive values, of tokens of a text, or of the hardest 70 % of a batch is known only
when the step runs. But a compiled program has one shape for each array. So the array has room for
all entries, and a mask marks the valid ones. Arrays computed from it have the same mask.

Values are selected with `jnp.where`, not multiplied by the mask, since 0 * inf is NaN.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
from jax.tree_util import register_dataclass

Array = jax.Array
Axis = int | tuple[int, ...] | None


def make_length_mask(lengths: Array, size: int) -> Array:
    """Return a mask of the positions within each length, int (...): bool (..., size)."""
    return jnp.arange(size) < jnp.asarray(lengths)[..., None]


def masked_sum(values: Array, where: Array, axis: Axis = None) -> Array:
    """Return the sum of the valid entries. Invalid entries get no gradient."""
    return jnp.sum(jnp.where(where, values, jnp.zeros((), values.dtype)), axis=axis)


def masked_mean(values: Array, where: Array, axis: Axis = None) -> Array:
    """Return the mean of the valid entries; 0 if none is valid. Invalid entries get no gradient.

    `where` is bool, of the shape of the values or one that broadcasts to it.
    """
    count = jnp.sum(jnp.broadcast_to(where, values.shape), axis=axis, dtype=jnp.int32)
    return masked_sum(values, where, axis) / jnp.maximum(count, 1)


def top_share_mask(losses: Array, share: float, where: Array | None = None) -> Array:
    """Return a mask of the largest `share` of the valid losses, bool like the losses.

    Of n losses it selects floor(share * n), at least one. Among equal losses the first are
    selected, and NaN is as large as infinity. `where` may broadcast. `share` is exact in decimal:
    0.29 of 100 are 29. Raises ValueError for a share outside (0, 1].
    """
    valid = jnp.broadcast_to(True if where is None else where, losses.shape)
    losses = jax.lax.stop_gradient(losses)
    key = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    key = key.ravel()
    num_selected = jnp.asarray(_list_share_counts(share, key.size))[jnp.sum(valid, dtype=jnp.int32)]
    # Invalid entries come last, even after a loss of minus infinity.
    order = jnp.lexsort((-key, ~valid.ravel()))
    first = jnp.arange(key.size) < num_selected
    return jnp.zeros(key.size, bool).at[order].set(first).reshape(losses.shape) & valid


def mean_of_hardest(losses: Array, share: float, where: Array | None = None) -> Array:
    """Return the mean of the largest `share` of the valid losses (Fan et al., 2017); 0 if none."""
    return masked_mean(losses, top_share_mask(losses, share, where))


def _list_share_counts(share: float, max_count: int) -> np.ndarray:
    """Return the number of losses in a share of 0 to `max_count` losses, int32 (max_count + 1,)."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share}: must be above 0 and at most 1")
    numerator, denominator = Fraction(repr(float(share))).as_integer_ratio()
    counts = (max(1, numerator * n // denominator) for n in range(1, max_count + 1))
    return np.array([0, *counts], np.int32)


@register_dataclass
@dataclass(frozen=True)
class Masked:
    """An array with the mask of its valid entries.

    `masked.select(values > 0)` replaces `values[values > 0]`, whose length depends on the values.
    """

    values: Array
    where: Array
    """bool, of the shape of the values."""

    @property
    def count(self) -> Array:
        """The number of valid entries, int32 ()."""
        return jnp.sum(self.where, dtype=jnp.int32)

    def select(self, condition: Array) -> Masked:
        """Keep the valid entries for which a condition of their shape holds."""
        return Masked(self.values, self.where & condition)

    def map(self, function: Callable[[Array], Array]) -> Masked:
        """Apply a function to each entry. It gets 0 for invalid entries, which get no gradient."""
        entries = jnp.where(self.where, self.values, jnp.zeros((), self.values.dtype))
        return Masked(function(entries), self.where)

    def sum(self) -> Array:
        """Return the sum of the valid entries, ()."""
        return masked_sum(self.values, self.where)

    def mean(self) -> Array:
        """Return the mean of the valid entries, (); 0 if none is valid."""
        return masked_mean(self.values, self.where)

    def hardest(self, share: float) -> Masked:
        """Keep the largest share of the valid entries; see `top_share_mask`."""
        return Masked(self.values, top_share_mask(self.values, share, self.where))


def choose(condition: Array, first: Masked, second: Masked) -> Masked:
    """Return `first` if a condition, bool (), is true, else `second`, which has the same shape."""
    return Masked(
        jnp.where(condition, first.values, second.values),
        jnp.where(condition, first.where, second.where),
    )
