"""Sums whose order of additions does not depend on the number of devices.

The gradients of a batch are the sum of the gradients of its shards. They are added in a binary tree
whose leaves are the shards in order: neighbours in pairs, then these sums in pairs, and so on. A
device adds the subtree of its shards in a loop, and all devices together add the rest. So the
additions, and the bits of the result, are the same on any number of devices. If the number of
leaves is 2^n times an odd number k, runs of k leaves are first added one after the other.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any, TypeVar

import jax
import jax.numpy as jnp
from jax import Array
from jax.flatten_util import ravel_pytree

from pipeline.data.batch import Batch
from pipeline.training.parallel.parallel_spec import Shards

T = TypeVar("T")

STACKED_BYTES = 1 << 30
"""If all terms together have at most this size, they are all computed before they are added. This
is faster."""


def sum_leaves(
    leaf: Callable[[Array], T], count: int, *, total_count: int | None = None, at_once: int = 1
) -> T:
    """Add the pytrees `leaf(0)` .. `leaf(count - 1)`, in order.

    The index is int32 (). `total_count` is the number of terms on all devices; it decides whether
    all terms are stored at once. XLA must not fuse a leaf with additions or other leaves, since
    fused operations may round once instead of twice. So leaves are computed in a loop whose number
    of iterations XLA can't see, even if there is one, and added outside of their computation.
    `at_once`, a power of two, is the number of independent subtrees of equal size: XLA may compute
    their leaves at the same time.
    """
    shapes = jax.eval_shape(leaf, jnp.int32(0))
    nbytes = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves(shapes))
    is_small = nbytes * (total_count or count) <= STACKED_BYTES
    sum_subtree = _sum_stacked if is_small else _sum_nested
    if at_once == 1:
        return sum_subtree(leaf, count, shapes)

    def compute_leaf(start: int, i: Array) -> T:
        return leaf(start + i)

    size = count // at_once
    starts = range(0, count, size)
    sums = [sum_subtree(partial(compute_leaf, start), size, shapes) for start in starts]
    while len(sums) > 1:
        pairs = zip(sums[0::2], sums[1::2], strict=True)
        sums = [_add(first, second) for first, second in pairs]
    return sums[0]


def _sum_stacked(leaf: Callable[[Array], T], count: int, shapes: T) -> T:
    """Compute all terms in a loop, then add them."""

    def write(i: Array, stack: T) -> T:
        return jax.tree.map(lambda terms, term: terms.at[i].set(term), stack, leaf(i))

    empty = jax.tree.map(lambda x: jnp.zeros((count, *x.shape), x.dtype), shapes)
    stack = _repeat(count, write, empty)
    return jax.tree.map(add_in_order, stack)


def _sum_nested(leaf: Callable[[Array], T], count: int, shapes: T) -> T:
    """Add each term in the iteration after its computation, so that XLA can't fuse the two. This
    needs memory for two terms per level of the tree."""
    zero = jax.tree.map(lambda x: jnp.zeros(x.shape, x.dtype), shapes)

    def sum_subtree(size: int, first: Array) -> T:
        branches = 2 if size % 2 == 0 else size
        child_size = size // branches

        def add(i: Array, sums: tuple[T, T]) -> tuple[T, T]:
            total, newest = sums
            start = first + i * child_size
            term = leaf(start) if child_size == 1 else sum_subtree(child_size, start)
            return _add(total, newest), term

        total, newest = _repeat(branches, add, (zero, zero))
        return _add(total, newest)

    return sum_subtree(count, jnp.int32(0))


def _add(first: T, second: T) -> T:
    return jax.tree.map(jnp.add, first, second)


def _repeat(count: int, body: Callable[[Array, T], T], start: T) -> T:
    """Return the value after `count` calls value = body(i, value), beginning with `start`. XLA
    can't see the number of calls."""
    hidden_count = jax.lax.optimization_barrier(jnp.int32(count))
    return jax.lax.fori_loop(jnp.int32(0), hidden_count, body, start)


def copy_unfused(tree: T) -> T:
    """Copy a pytree of float32 and integers, so that XLA doesn't fuse its computation with the
    operations that read it.

    XLA would fuse a sum with its readers, such as the norm of the gradients, and vectorize it
    differently than a sum from several devices. The copy is a loop of one iteration, a number that
    XLA can't see.
    """

    def times_one(i: Array, values: T) -> T:
        return jax.tree.map(lambda x: x * (i + 1).astype(x.dtype), values)

    return _repeat(1, times_one, tree)


def add_devices(tree: T, axis: str, devices: int) -> T:
    """Add the pytrees of the devices along a mesh axis, in order; every device gets the sum.

    It must be called inside `shard_map`, on float32 and integers. Each device adds a part of the
    floats, between an all-to-all and an all-gather. These two move as many bytes as an all-reduce
    in a ring.
    """
    leaves, structure = jax.tree.flatten(tree)
    integers: dict[int, Array] = {}
    floats: dict[int, Array] = {}
    for index, leaf in enumerate(leaves):
        group = integers if jnp.issubdtype(leaf.dtype, jnp.integer) else floats
        group[index] = leaf
    sums = _add_floats(floats, axis, devices) if floats else {}
    if integers:
        sums |= jax.lax.psum(integers, axis)
    return jax.tree.unflatten(structure, [sums[index] for index in range(len(leaves))])


def _add_floats(values: dict[int, Array], axis: str, devices: int) -> dict[int, Array]:
    flat, unravel = ravel_pytree(values)
    parts = jnp.pad(flat, (0, -flat.size % devices)).reshape(devices, -1)
    parts = jax.lax.all_to_all(parts, axis, split_axis=0, concat_axis=0)
    total: Any = jax.lax.all_gather(add_in_pairs(parts), axis, tiled=True)
    return unravel(total[: flat.size])


def add_in_order(terms: Array) -> Array:
    """Add (n, ...) along its first axis, in the order of the tree."""
    count = terms.shape[0]
    num_runs = count & -count  # The largest power of two that divides the count.
    runs = terms.reshape(num_runs, count // num_runs, *terms.shape[1:])
    sums = runs[:, 0]
    for position in range(1, runs.shape[1]):
        sums = sums + runs[:, position]
    return add_in_pairs(sums)


def add_in_pairs(terms: Array) -> Array:
    """Add (n, ...) along its first axis, neighbours first. Raises ValueError if n isn't 2^k."""
    if terms.shape[0] & (terms.shape[0] - 1):
        raise ValueError(f"{terms.shape[0]} terms have no binary tree")
    while terms.shape[0] > 1:
        terms = terms[0::2] + terms[1::2]
    return terms[0]


def sum_shards(shards: Shards, batch: Batch, compute: Callable[[Batch, Array], T]) -> T:
    """Add `compute(shard, number)` of all shards of a batch; `number` is int32 (). `batch` is this
    device's part, with the `count` of the whole batch. A shard's `count` may be 0."""
    return sum_devices(shards, sum_local_shards(shards, batch, compute))


def sum_local_shards(shards: Shards, batch: Batch, compute: Callable[[Batch, Array], T]) -> T:
    """Add `compute(shard, number)` of this device's shards, as `sum_shards` does."""
    first = jnp.int32(0)
    if shards.axis is not None:
        first = jax.lax.axis_index(shards.axis) * shards.per_device
    if shards.add == "psum":
        return compute(_slice_shard(shards, batch, jnp.int32(0), first), first)

    def leaf(i: Array) -> T:
        # A shard isn't fused with the slicing, which depends on the number of devices.
        shard = jax.lax.optimization_barrier(_slice_shard(shards, batch, i, first + i))
        return compute(shard, first + i)

    return sum_leaves(leaf, shards.per_device, total_count=shards.count, at_once=shards.at_once)


def sum_devices(shards: Shards, local: T) -> T:
    """Add the values of all devices; every device gets the sum."""
    if shards.add == "psum":
        return local if shards.axis is None else jax.lax.psum(local, shards.axis)
    total = local if shards.axis is None else add_devices(local, shards.axis, shards.devices)
    return copy_unfused(total)


def place_in_batch(rows: Array, number: Array, num_shards: int) -> Array:
    """Return the rows of shard `number` at their place in the whole batch, and zeros for the rows
    of other shards. The sum over shards has all rows."""
    size = rows.shape[0]
    zeros = jnp.zeros((num_shards * size, *rows.shape[1:]), rows.dtype)
    return jax.lax.dynamic_update_slice_in_dim(zeros, rows, number * size, 0)


def gather_rows(shards: Shards | None, rows: Array) -> Array:
    """Return the rows of the whole batch from this device's rows."""
    if shards is None or shards.axis is None:
        return rows
    gathered: Array = jax.lax.all_gather(rows, shards.axis, tiled=True)
    return gathered


def _slice_shard(shards: Shards, batch: Batch, i: Array, number: Array) -> Batch:
    """Return the i-th shard of a device's part of a batch; `number` is its index in the batch."""
    size = batch.sample.shape[0] // shards.per_device

    def slice_rows(column: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(column, i * size, size)

    return replace(
        batch,
        columns={name: slice_rows(column) for name, column in batch.columns.items()},
        sample=slice_rows(batch.sample),
        count=jnp.clip(batch.count - number * size, 0, size),
    )
