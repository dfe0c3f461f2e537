"""One compiled branch for each bucket that images are padded to."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import partial
from typing import TypeVar

import jax
import jax.numpy as jnp
from jax import Array

from pipeline.data.batch import Batch
from pipeline.data.padding.buckets import SIZE, Bucket
from pipeline.data.padding.pad_images import crop_to

T = TypeVar("T")


def apply_in_bucket(
    buckets: Sequence[Bucket],
    batch: Batch,
    compute: Callable[[Batch], T],
    *,
    is_random: bool = True,
) -> T:
    """Apply `compute` to a batch whose images are cropped to the first bucket that covers them all.

    An image that is larger than every bucket is cropped at a random place, or in the middle if not
    `is_random`. Without buckets the batch isn't cropped. `compute` is traced once for each bucket:
    the program has a branch for each, and the device selects it without waiting for the host.
    Outside of jit Python selects it.
    """
    if not buckets:
        return compute(batch)

    def compute_cropped(bucket: Bucket, batch: Batch) -> T:
        return compute(crop_to(jnp, bucket, batch, is_random=is_random))

    largest_size = batch.columns[SIZE].max(axis=0)
    covers = (largest_size <= jnp.array(buckets, jnp.int32)).all(axis=-1)
    first = jnp.argmax(covers)
    branches = [partial(compute_cropped, bucket) for bucket in buckets]
    if not isinstance(first, jax.core.Tracer):
        return branches[int(first)](batch)
    return jax.lax.switch(first, branches, batch)


def add_padding_mask(images: Array, sizes: Array) -> Array:
    """Add a channel to images (B, H, W, C): 1 within the image's size, 0 on padding. `sizes` are
    the images' heights, (B, 1), or heights and widths, (B, 2), if both vary."""
    inside = jnp.ones((*images.shape[:3], 1), images.dtype)
    for axis in range(sizes.shape[1]):
        positions = jax.lax.broadcasted_iota(jnp.int32, inside.shape, 1 + axis)
        inside *= positions < sizes[:, axis, None, None, None]
    return jnp.concatenate([images, inside], axis=-1)
