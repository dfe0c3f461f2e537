"""Sizes of images: padded to buckets, or drawn for each step; checked as the data is read."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace

import numpy as np

from pipeline.core.errors import RecipeError
from pipeline.core.host.memory import require_room
from pipeline.data.columns import ColumnSpec, RawData, Split
from pipeline.data.dataset_spec import DatasetSpec, MapOp, Op
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
from pipeline.data.transform import compute_column_specs, count_choices, select_ops


def pad_images(
    raw: RawData, buckets: Sequence[Bucket], dataset: DatasetSpec, batch_size: int
) -> RawData:
    """Pad the images of a dataset to its buckets; without buckets, return it unchanged.

    Raises RecipeError if images have several sizes and there are no buckets, if no bucket fits, and
    if a batch of padded samples has no room in memory.
    """
    if not buckets:
        _refuse_several_sizes(raw)
        return raw
    ignore_index = dataset.ignore_index
    crop = dataset.oversized == "crop"
    padded = []
    for name, split in (("training", raw.train), ("evaluation", raw.eval)):
        try:
            result = pad_split(split, buckets, ignore_index=ignore_index, crop=crop)
            require_room(batch_size * result.sample_bytes, f"a padded batch of {batch_size:,}")
        except ValueError as error:
            raise RecipeError(f"dataset.buckets: {name} images: {error}") from error
        padded.append(result)
    return replace(raw, train=padded[0], eval=padded[1])


def _refuse_several_sizes(raw: RawData) -> None:
    for split in (raw.train, raw.eval):
        images = split.columns["image"]
        if not isinstance(images, RaggedColumn) and isinstance(
            split.columns["label"], RaggedColumn
        ):
            raise RecipeError(
                "dataset: labels are of several sizes and images of one; each place needs a label"
            )
        if isinstance(images, RaggedColumn):
            largest = images.sizes.max(axis=0).tolist()
            raise RecipeError(
                "dataset.buckets = null: the images are of several sizes; give what to pad "
                f"them to, such as [{largest}]"
            )


def order_in_buckets(order: SampleOrder, split: Split, buckets: Sequence[Bucket]) -> SampleOrder:
    """Return the order whose batches are of one bucket each. Raises RecipeError without one."""
    if not buckets:
        return order
    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    settings = {field.name: getattr(order, field.name) for field in fields(order)}
    try:
        return BucketedOrder(**settings, buckets=numbers)
    except ValueError as error:
        raise RecipeError(f"dataset.buckets: {error}") from error


def refuse_useless_buckets(order: SampleOrder, split: Split, buckets: Sequence[Bucket]) -> None:
    """Raise RecipeError for a bucket of which no sample of the training split is ever read."""
    if not buckets:
        return
    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    try:
        require_used_buckets(numbers, buckets, order.batch_size if order.drop_remainder else 1)
    except ValueError as error:
        raise RecipeError(f"dataset.buckets: {error}") from error


def bucket_line(split: Split, buckets: Sequence[Bucket], samples: str = "images") -> str:
    """Return the number of samples of a padded split in each bucket, for the log."""
    numbers = assign_buckets(split.columns[SIZE][:], buckets)
    counts = np.bincount(numbers, minlength=len(buckets)).tolist()
    shares = [
        f"{'x'.join(map(str, bucket))} ({count:,} samples)"
        for bucket, count in zip(buckets, counts, strict=True)
    ]
    return f"training {samples} padded to {', '.join(shares)}"


def specs_in(bucket: Bucket, specs: Mapping[str, ColumnSpec]) -> dict[str, ColumnSpec]:
    """Return the column specs of a padded split in a batch of a bucket."""
    image = specs["image"]
    label = specs["label"]
    shapes = {"image": (*bucket, *image.shape[len(bucket) :])}
    if label.shape:
        shapes["label"] = bucket
    changed = {name: replace(specs[name], shape=shape) for name, shape in shapes.items()}
    return {**specs, **changed}


def refuse_moved_padding(dataset: DatasetSpec) -> None:
    """Raise RecipeError for a map op that shifts padding away from its mask."""
    for key, split in (("train", dataset.train), ("eval", dataset.eval)):
        for position, op in enumerate(split.ops):
            if isinstance(op, Op) and op.moves_pixels and op.column == "image":
                raise RecipeError(
                    f"dataset.padding_mask = true: dataset.{key}.ops.{position} ({op.name}) "
                    "moves pixels, and the mask is of the images as they were read; leave out "
                    "the op or the mask"
                )


def with_mask_channel(image: ColumnSpec, bucket: Bucket) -> ColumnSpec:
    """Add the mask channel of padding to an image spec, last or, for CHW images, first axis.

    The mask is of the image as it was read. Raises RecipeError if ops change its size.
    """
    axes = image.shape if image.layout == "hwc" else (*image.shape[1:], image.shape[0])
    if axes[: len(bucket)] != bucket:
        raise RecipeError(
            f"dataset.padding_mask = true: the map ops make {list(axes[: len(bucket)])} of "
            f"{list(bucket)}; they must leave the size as it is"
        )
    channels_last = (*axes[:-1], axes[-1] + 1)
    hwc = image.layout == "hwc"
    return replace(image, shape=channels_last if hwc else (channels_last[-1], *channels_last[:-1]))


def drawn_specs(ops: Sequence[MapOp], split: Split) -> tuple[ColumnSpec, ...]:
    """Return the spec of a mapped image by size; () if no op draws one.

    Raises RecipeError that names the op which can't be applied to a size.
    """
    choices = count_choices(ops)
    if choices == 1:
        return ()
    sized = [select_ops(ops, number) for number in range(choices)]
    try:
        return tuple(compute_column_specs(sized_ops, split.specs())["image"] for sized_ops in sized)
    except ValueError as error:
        raise RecipeError(f"dataset.train.{error}") from error


def fit_to_evaluation(
    train: Mapping[str, ColumnSpec], evaluated: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return training's column specs in the size of evaluation, which the network is built for."""
    image = train["image"]
    label = train["label"]
    channel = 2 if image.layout == "hwc" else 0
    other = evaluated["image"]
    if (image.layout, image.shape[channel]) == (other.layout, other.shape[channel]):
        image = replace(image, shape=other.shape)
    if len(label.shape) == len(evaluated["label"].shape):
        label = replace(label, shape=evaluated["label"].shape)
    return {**train, "image": image, "label": label}
