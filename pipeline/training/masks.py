"""Masked arrays: for numbers of entries that a compiled program computes itself.

The number of positive values, or of tokens of a text, is known only when the step runs. But a
compiled program has one shape for each array. So the array has room for the largest number of
entries, and a mask marks the valid entries. Arrays computed from it have the same mask.

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
    """Return a mask of the first positions of `size`, bool (..., size), from lengths, int (...)."""
    return jnp.arange(size) < jnp.asarray(lengths)[..., None]


def masked_sum(values: Array, where: Array, axis: Axis = None) -> Array:
    """Return the sum of the valid entries. Invalid entries get no gradient. `where`, bool, has the
    shape of the values or broadcasts to it."""
    return jnp.sum(jnp.where(where, values, jnp.zeros((), values.dtype)), axis=axis)


def masked_mean(values: Array, where: Array, axis: Axis = None) -> Array:
    """Return the mean of the valid entries; 0 if none is valid. Invalid entries get no gradient.
    `where`, bool, has the shape of the values or broadcasts to it."""
    count = jnp.sum(jnp.broadcast_to(where, values.shape), axis=axis, dtype=jnp.int32)
    return masked_sum(values, where, axis) / jnp.maximum(count, 1)


def top_share_mask(losses: Array, share: float, where: Array | None = None) -> Array:
    """Return a mask of the largest `share` of the valid losses, bool, in the shape of the losses.

    Of n valid losses it selects floor(share * n), but at least one if n > 0. Of equal losses the
    first are selected, and NaN is as large as infinity. `where`, bool, marks the valid losses and
    broadcasts to their shape. `share` is read as a decimal number, so 0.29 of 100 are 29. Raises
    ValueError for a share outside (0, 1].
    """
    valid = jnp.broadcast_to(True if where is None else where, losses.shape)
    losses = jax.lax.stop_gradient(losses)
    sizes = jnp.where(jnp.isnan(losses), jnp.inf, losses)
    sizes = sizes.ravel()
    share_counts = jnp.asarray(_list_share_counts(share, sizes.size))
    num_selected = share_counts[jnp.sum(valid, dtype=jnp.int32)]
    # Invalid entries come last, even after a loss of minus infinity.
    order = jnp.lexsort((-sizes, ~valid.ravel()))
    is_selected = jnp.arange(sizes.size) < num_selected
    return jnp.zeros(sizes.size, bool).at[order].set(is_selected).reshape(losses.shape) & valid


def mean_of_hardest(losses: Array, share: float, where: Array | None = None) -> Array:
    """Return the mean of the largest `share` of the valid losses (Fan et al., 2017); 0 if none is
    valid."""
    return masked_mean(losses, top_share_mask(losses, share, where))


def _list_share_counts(share: float, max_count: int) -> np.ndarray:
    """Return the number of losses that a share of n losses has, for n from 0 to `max_count`, int32
    (max_count + 1,). Raises ValueError for a share outside (0, 1]."""
    if not 0 < share <= 1:
        raise ValueError(f"a share of {share}: must be above 0 and at most 1")
    numerator, denominator = Fraction(repr(float(share))).as_integer_ratio()
    counts = (max(1, numerator * n // denominator) for n in range(1, max_count + 1))
    return np.array([0, *counts], np.int32)


@register_dataclass
@dataclass(frozen=True)
class Masked:
    """An array with the mask of its valid entries. `masked.select(values > 0)` replaces
    `values[values > 0]`, whose length depends on the values."""

    values: Array
    where: Array
    """bool, of the shape of the values."""

    @property
    def count(self) -> Array:
        """The number of valid entries, int32 ()."""
        return jnp.sum(self.where, dtype=jnp.int32)

    def select(self, condition: Array) -> Masked:
        """Keep the valid entries for which `condition`, bool, of the shape of the values, is
        True."""
        return Masked(self.values, self.where & condition)

    def map(self, function: Callable[[Array], Array]) -> Masked:
        """Apply an elementwise function to the values. For invalid entries the function gets 0, and
        they get no gradient."""
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
    """Return `first` if `condition`, bool (), is True, else `second`. Both have the same shape."""
    return Masked(
        jnp.where(condition, first.values, second.values),
        jnp.where(condition, first.where, second.where),
    )
