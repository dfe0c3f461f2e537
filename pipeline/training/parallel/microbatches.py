"""Microbatches: equal parts of a batch, one after the other, whose gradients are summed.

Steps, dumps, autopsies and the checks of a recipe call these functions.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import ceil
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from jax import Array


def compute_batch_multiple(num_microbatches: int, num_parts: int = 1) -> int:
    """Return the number that a batch size must be a multiple of. Each of `num_parts` devices or
    shards splits its part of the batch into microbatches."""
    return num_microbatches * num_parts


def compute_microbatch_size(batch_size: int, num_microbatches: int, num_parts: int = 1) -> int:
    """Return the number of samples of a microbatch."""
    return batch_size // compute_batch_multiple(num_microbatches, num_parts)


def list_batch_positions(
    rows: Sequence[int], index: int, batch_size: int, num_microbatches: int
) -> tuple[int, ...]:
    """Return the positions in the batch of the rows `rows` of microbatch `index`. With one
    microbatch they are `rows`, whatever the index."""
    if num_microbatches == 1:
        return tuple(rows)
    first = index * compute_microbatch_size(batch_size, num_microbatches)
    return tuple(first + row for row in rows)


def stack_microbatches(samples: Any, key: Array, num_microbatches: int) -> tuple[Any, Array]:
    """Split a batch into microbatches. Takes a tree of arrays (batch, ...) and a dropout key.
    Returns the tree with arrays (microbatches, samples, ...), and a key for each microbatch. The
    key of a single microbatch is `key`."""
    import jax
    import jax.numpy as jnp

    def split(array: Array) -> Array:
        return array.reshape(num_microbatches, -1, *array.shape[1:])

    if num_microbatches == 1:
        return jax.tree.map(split, samples), key[None]
    keys = jax.vmap(lambda i: jax.random.fold_in(key, i))(jnp.arange(num_microbatches))
    return jax.tree.map(split, samples), keys


def find_smaller_microbatches(batch_size: int, accumulate_steps: int, factor: float) -> int | None:
    """Return the least number of equal microbatches that are smaller by `factor`; None if samples
    would have to be divided."""
    least = accumulate_steps * ceil(factor)
    return next((n for n in range(least, batch_size + 1) if batch_size % n == 0), None)
