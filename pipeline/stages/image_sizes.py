"""Sizes of images, which are padded to buckets or drawn for each step."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.core.host.memory import require_room
from pipeline.data.columns import ColumnSpec, RawData, Split, SplitKey
from pipeline.data.dataset_spec import DatasetSpec, MapOp
from pipeline.data.group_orders import BucketedOrder
from pipeline.data.order import SampleOrder
from pipeline.data.padding.buckets import (
    SIZE,
    Bucket,
    RaggedColumn,
    assign_buckets,
    require_used_buckets,
)
from pipeline.data.padding.pad_images import pad_split
from pipeline.data.transform import compute_column_specs, count_choices, select_variants
from pipeline.stages.key_errors import prefixing_problems
from pipeline.training.initial_state import get_image_shape


def pad_images(
    raw: RawData, buckets: Sequence[Bucket], dataset: DatasetSpec, batch_size: int
) -> RawData:
    """Return the data with images padded to buckets; unchanged without buckets.

    Raises RecipeError for several sizes without buckets, for an image that fits no bucket, and if a
    batch of padded samples doesn't fit into memory.
    """
    if not buckets:
        _refuse_several_sizes(raw)
        return raw
    ignore_index = dataset.ignore_index
    crop = dataset.oversized == "crop"
    splits: tuple[tuple[SplitKey, str], ...] = (("train", "training"), ("eval", "evaluation"))
    for key, name in splits:
        with prefixing_problems(f"dataset.buckets: {name} images: "):
            padded = pad_split(getattr(raw, key), buckets, ignore_index=ignore_index, crop=crop)
            require_room(batch_size * padded.sample_bytes, f"a padded batch of {batch_size:,}")
        raw = raw.with_split(key, padded)
    return raw


def _refuse_several_sizes(raw: RawData) -> None:
    """Raise RecipeError if images or labels have several sizes."""
    for split in (raw.train, raw.eval):
        images = split.columns["image"]
        if isinstance(images, RaggedColumn):
            largest = images.sizes.max(axis=0).tolist()
            raise RecipeError(
                "dataset.buckets = null: the images have several sizes; give sizes to pad them "
                f"to, such as [{largest}]"
            )
        if isinstance(split.columns["label"], RaggedColumn):
            raise RecipeError(
                "dataset: labels have several sizes and images have one; each pixel needs a label"
            )


def order_in_buckets(
    order: SampleOrder, split: Split, buckets: Sequence[Bucket], *, uses_all: bool = False
) -> SampleOrder:
    """Return an order in which all images of a batch have the same bucket.

    Without buckets, returns `order`. Raises RecipeError if a batch can't be filled from any bucket,
    or with `uses_all` from some bucket.
    """
    if not buckets:
        return order
    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    with prefixing_problems("dataset.buckets: "):
        if uses_all:
            require_used_buckets(numbers, buckets, order.batch_size if order.drop_remainder else 1)
        return BucketedOrder(**vars(order), buckets=numbers)


def format_buckets(split: Split, buckets: Sequence[Bucket], samples: str) -> str:
    """Return the number of samples in each bucket of a padded split, as a line for the log."""
    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    counts = np.bincount(numbers, minlength=len(buckets)).tolist()
    texts = [
        f"{'x'.join(map(str, bucket))} ({count:,} samples)"
        for bucket, count in zip(buckets, counts, strict=True)
    ]
    return f"training {samples} padded to {', '.join(texts)}"


def fit_specs_to_bucket(bucket: Bucket, specs: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:
    """Return the specs of samples that are padded to a bucket: images, and labels of pixels."""
    image = specs["image"]
    label = specs["label"]
    image = replace(image, shape=(*bucket, *image.shape[len(bucket) :]))
    if label.shape:
        label = replace(label, shape=bucket)
    return {**specs, "image": image, "label": label}


def refuse_moved_padding(dataset: DatasetSpec) -> None:
    """Raise RecipeError for a map op that moves pixels of an image away from the padding mask."""
    for key, split in (("train", dataset.train), ("eval", dataset.eval)):
        for position, op in enumerate(split.ops):
            if op.moves_pixels and "image" in op.columns:
                raise RecipeError(
                    f"dataset.padding_mask = true: dataset.{key}.ops.{position} ({op.name}) "
                    "moves pixels, and the mask fits only the original pixels; leave out the op "
                    "or the mask"
                )


def with_mask_channel(image: ColumnSpec, bucket: Bucket) -> ColumnSpec:
    """Return the spec of images with one more channel, for the padding mask.

    The mask has the size of the bucket. Raises RecipeError if map ops change the size of images.
    """
    *size, channels = get_image_shape(image)
    mapped_size = size[: len(bucket)]
    if tuple(mapped_size) != bucket:
        raise RecipeError(
            f"dataset.padding_mask = true: the map ops change the size {list(bucket)} to "
            f"{mapped_size}; they must keep it"
        )
    shape = (*size, channels + 1) if image.layout == "hwc" else (channels + 1, *size)
    return replace(image, shape=shape)


def list_drawn_specs(ops: Sequence[MapOp], split: Split) -> tuple[ColumnSpec, ...]:
    """Return the spec of a mapped image for each size that an op draws; () if no op draws sizes.

    Raises RecipeError with the name of an op that can't be applied to a size.
    """
    choices = count_choices(ops)
    if choices == 1:
        return ()
    sized = [select_variants(ops, choice) for choice in range(choices)]
    with prefixing_problems("dataset.train."):
        return tuple(compute_column_specs(sized_ops, split.specs())["image"] for sized_ops in sized)


def fit_to_evaluation(
    train: Mapping[str, ColumnSpec], evaluated: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return the column specs of training with the sizes of evaluation.

    Images of another layout or number of channels, and labels of another rank, aren't changed.
    """
    image = train["image"]
    label = train["label"]
    eval_image = evaluated["image"]
    channel_axis = 2 if image.layout == "hwc" else 0
    has_same_channels = image.shape[channel_axis] == eval_image.shape[channel_axis]
    if image.layout == eval_image.layout and has_same_channels:
        image = replace(image, shape=eval_image.shape)
    if len(label.shape) == len(evaluated["label"].shape):
        label = replace(label, shape=evaluated["label"].shape)
    return {**train, "image": image, "label": label}
