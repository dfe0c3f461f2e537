"""Padding of samples and of the labels of their positions, and crops of a batch to its bucket."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from pipeline.data.batch import Batch
from pipeline.data.columns import Column, Split
from pipeline.data.padding.buckets import (
    SIZE,
    Bucket,
    PaddedColumn,
    Padding,
    assign_buckets,
    compute_canvas,
    to_ragged,
)
from pipeline.data.random import scale_to_integers, uniforms

UNCROPPED_SIZE = "uncut_size"
"""Name of the column of the sizes of images before a crop, int32 (samples, dimensions). A split has
it if some images are larger than their buckets."""
CROP_OP = 1 << 30
"""Op number in the key of random crops, larger than any index of a map op."""


def pad_split(
    split: Split, padding: Padding, *, ignore_index: int | None = None, crop: bool = False
) -> Split:
    """Return the split with samples padded to a size that holds all buckets, and a column `SIZE`.

    Labels of positions are padded with `ignore_index`. With `crop`, samples may be larger than
    every bucket: the padded size then also holds the largest sample, and `SIZE` has the sizes after
    `crop_to`. Raises ValueError if buckets don't have the dimensions of the images, if no bucket
    covers an image and `crop` is false, and if labels can't be padded.
    """
    buckets = padding.buckets
    images = to_ragged(split.columns[padding.column], len(buckets[0]))
    full_sizes = images.sizes
    if full_sizes.shape[1] != len(buckets[0]):
        listed = [list(bucket) for bucket in buckets]
        raise ValueError(f"{listed}: must have {full_sizes.shape[1]} numbers each for these images")
    numbers = assign_buckets(full_sizes, buckets, crop=crop)
    sizes = np.minimum(full_sizes, np.array(buckets)[numbers]).astype(np.int32)
    columns: dict[str, Column] = {**split.columns, SIZE: sizes}
    canvas = compute_canvas(buckets)
    if not np.array_equal(sizes, full_sizes):
        columns[UNCROPPED_SIZE] = full_sizes
        canvas = compute_canvas([canvas, compute_canvas(full_sizes)])
    columns[padding.column] = PaddedColumn(images, canvas)
    columns["label"] = _pad_labels(split.columns["label"], full_sizes, canvas, ignore_index)
    return replace(split, columns=columns)


def is_of_positions(dimensions: int, dtype: Any) -> bool:
    """Return whether labels with `dimensions` axes are classes of positions. Labels of the whole
    sample have no axes, or are floats (K,): numbers to predict, or 0 and 1."""
    return dimensions > 0 and np.issubdtype(dtype, np.integer)


def _pad_labels(
    labels: Column, sizes: np.ndarray, canvas: Bucket, ignore_index: int | None
) -> Column:
    """Return labels of positions padded like the images, and other labels as they are. Raises
    ValueError if labels of positions have other sizes than the images, and if `ignore_index` is
    missing or doesn't fit their dtype."""
    dimensions = len(labels.shape) - 1
    if not is_of_positions(dimensions, labels.dtype):
        return labels
    positions = to_ragged(labels, dimensions)
    if not np.array_equal(positions.sizes, sizes):
        raise ValueError(
            f"labels of shape {labels.shape[1:]} don't have the sizes of the images, so that "
            "they can't be padded like them"
        )
    if ignore_index is None:
        raise ValueError(
            f"labels of shape {labels.shape[1:]} need padding too; set dataset.ignore_index to "
            "the label that padding gets, such as -100"
        )
    bounds = np.iinfo(labels.dtype)
    if not bounds.min <= ignore_index <= bounds.max:
        raise ValueError(
            f"labels are {labels.dtype}, which can't hold dataset.ignore_index = "
            f"{ignore_index}; must be {bounds.min} to {bounds.max}"
        )
    return PaddedColumn(positions, canvas, ignore_index)


def crop_to(
    xp: Any, bucket: Bucket, batch: Batch, names: Sequence[str], *, is_random: bool
) -> Batch:
    """Return a batch, padded by `pad_split`, with its columns `names` cropped to one bucket. Labels
    of a whole sample stay. Of a sample that is larger than the bucket, a part is drawn by (seed,
    epoch, sample), or the middle is used if `is_random` is false. Results are the same if `xp` is
    numpy or jax.numpy.
    """
    columns = batch.columns
    index: list[Any]
    if UNCROPPED_SIZE not in columns:
        index = [slice(None), *(slice(length) for length in bucket)]
    else:
        room = columns[UNCROPPED_SIZE] - columns[SIZE]
        if is_random:
            draws = uniforms(xp, batch.seed, batch.epoch, batch.sample, CROP_OP, len(bucket))
            corner = scale_to_integers(xp, draws, (room + 1).astype(np.float32))
        else:
            corner = room // 2
        # int32 (batch, 1, 1), (batch, height, 1), (batch, 1, width) for buckets of two dimensions.
        index = [np.arange(len(room), dtype=np.int32).reshape(-1, *(1,) * len(bucket))]
        for axis, length in enumerate(bucket):
            indices = corner[:, axis : axis + 1] + np.arange(length, dtype=np.int32)
            shape = [1] * len(bucket)
            shape[axis] = length
            index.append(indices.reshape([-1, *shape]))
    cropped = {
        name: columns[name][tuple(index)]
        for name in names
        if name != "label" or is_of_positions(columns[name].ndim - 1, columns[name].dtype)
    }
    return replace(batch, columns={**columns, **cropped})
