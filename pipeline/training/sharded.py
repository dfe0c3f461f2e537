"""A batch in shards: the same computation for each, and the sum over all devices."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.data.batch import Batch
from pipeline.training.parallel.fixed_sum import add_devices, sum_leaves, written_out
from pipeline.training.parallel.shards import Shards

T = TypeVar("T")


def sum_shards(shards: Shards, batch: Batch, compute: Callable[[Batch, Array], T]) -> T:
    """Add `compute(shard, number)` of all shards of a batch; `number` is int32 ().

    `batch` is this device's part of it, and its `count` that of the whole batch. A shard's own
    `count` may be 0.
    """
    return sum_devices(shards, sum_own_shards(shards, batch, compute))


def sum_own_shards(shards: Shards, batch: Batch, compute: Callable[[Batch, Array], T]) -> T:
    """Add `compute(shard, number)` of this device's shards, as `sum_shards` does."""
    first = jnp.int32(0)
    if shards.axis is not None:
        first = jax.lax.axis_index(shards.axis) * shards.own
    if shards.add == "psum":
        return compute(_shard(shards, batch, jnp.int32(0), first), first)

    def leaf(i: Array, carry: None) -> tuple[T, None]:
        # Nothing of a shard is fused with what it is cut from, which depends on the layout.
        shard = jax.lax.optimization_barrier(_shard(shards, batch, i, first + i))
        return compute(shard, first + i), carry

    return sum_leaves(leaf, shards.own, None, of=shards.count)[0]


def sum_devices(shards: Shards, own: T) -> T:
    """Add what each device has; every device has the sum."""
    if shards.add == "psum":
        return own if shards.axis is None else jax.lax.psum(own, shards.axis)
    total = own if shards.axis is None else add_devices(own, shards.axis, shards.devices)
    return written_out(total)


def _shard(shards: Shards, batch: Batch, i: Array, number: Array) -> Batch:
    """Return the i-th shard of a device's part of a batch, of that number in the whole batch."""
    size = batch.sample.shape[0] // shards.own

    def cut(column: Array) -> Array:
        return jax.lax.dynamic_slice_in_dim(column, i * size, size)

    return replace(
        batch,
        columns={name: cut(column) for name, column in batch.columns.items()},
        sample=cut(batch.sample),
        count=jnp.clip(batch.count - number * size, 0, size),
    )
