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

    Of an image that is larger than every bucket, a part at a random place remains, or the middle if
    not `is_random`. `compute` is traced once for each bucket. The program has a branch for each, so
    that a sink needs no decision of the host.
    """
    if not buckets:
        return compute(batch)

    def compute_in(bucket: Bucket, batch: Batch) -> T:
        return compute(crop_to(jnp, bucket, batch, is_random=is_random))

    largest = batch.columns[SIZE].max(axis=0)
    covers = (largest <= jnp.array(buckets, jnp.int32)).all(axis=-1)
    branches = [partial(compute_in, bucket) for bucket in buckets]
    return jax.lax.switch(jnp.argmax(covers), branches, batch)


def add_padding_mask(images: Array, sizes: Array) -> Array:
    """Add a channel to images (B, H, W, C): 1 within the image's size, 0 on padding.

    `sizes` (B, 1 or 2) are the heights, and the widths if images vary in both."""
    inside = jnp.ones((*images.shape[:3], 1), images.dtype)
    for axis in range(sizes.shape[1]):
        positions = jax.lax.broadcasted_iota(jnp.int32, inside.shape, 1 + axis)
        inside *= positions < sizes[:, axis, None, None, None]
    return jnp.concatenate([images, inside], axis=-1)
