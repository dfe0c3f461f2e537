"""One compiled branch for each bucket that samples are padded to."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp

from pipeline.data.batch import Batch
from pipeline.data.padding.buckets import SIZE, Bucket, Padding

T = TypeVar("T")


def apply_in_bucket(
    padding: Padding,
    batch: Batch,
    compute: Callable[[Batch], T],
    *,
    is_random: bool = True,
) -> T:
    """Apply `compute` to a batch whose samples are cropped to the first bucket that covers all.

    A sample that is larger than every bucket is cropped at a random place, or in the middle if not
    `is_random`. Without buckets the batch isn't cropped. `compute` is traced once for each bucket:
    the program has a branch for each, and the device selects it without waiting for the host.
    Outside of jit Python selects it.
    """
    buckets = padding.buckets
    if not buckets:
        return compute(batch)
    # Imported here, since few datasets have buckets.
    from pipeline.data.padding.pad_samples import crop_to

    def compute_cropped(bucket: Bucket, batch: Batch) -> T:
        return compute(crop_to(jnp, bucket, batch, padding.columns, is_random=is_random))

    largest_size = batch.columns[SIZE].max(axis=0)
    covers = (largest_size <= jnp.array(buckets, jnp.int32)).all(axis=-1)
    # Some bucket covers all: SIZE has the sizes after a crop to the largest one.
    first = jnp.argmax(covers)
    branches = [partial(compute_cropped, bucket) for bucket in buckets]
    if not isinstance(first, jax.core.Tracer):
        return branches[int(first)](batch)
    return jax.lax.switch(first, branches, batch)
