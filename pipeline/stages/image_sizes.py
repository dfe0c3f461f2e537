"""Padding and buckets: applied to a dataset that was read, or refused."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from functools import partial

import jax
import numpy as np
from flax.errors import FlaxError

from pipeline.core.errors import RecipeError
from pipeline.core.host.memory import require_room
from pipeline.data.batch import Batch
from pipeline.data.columns import ColumnSpec, RawData, Split
from pipeline.data.dataset_spec import DatasetSpec, MapOp, Op
from pipeline.data.order import SampleOrder
from pipeline.data.padding.bucketed_order import BucketedOrder
from pipeline.data.padding.buckets import (
    SIZE,
    Bucket,
    RaggedColumn,
    assign_buckets,
    check_every_bucket_is_used,
)
from pipeline.data.padding.pad_images import pad_split
from pipeline.data.transform import choices_among, chosen_ops, column_specs
from pipeline.training.parallel.microbatches import batch_multiple
from pipeline.training.state import StepConfig, TrainState
from pipeline.training.step import gradients_of, make_train_step


def pad_images(
    raw: RawData, buckets: Sequence[Bucket], dataset: DatasetSpec, batch_size: int
) -> RawData:
    """Pad the images of a dataset to its buckets; without buckets, return it unchanged.

    Raises RecipeError where images have several sizes and there are no buckets, where no bucket
    fits, and where a batch of padded samples has no room in memory.
    """
    if not buckets:
        _refuse_several_sizes(raw)
        return raw
    padded = []
    for name, split in (("training", raw.train), ("evaluation", raw.eval)):
        try:
            padded.append(_padded(split, buckets, dataset, batch_size))
        except ValueError as error:
            raise RecipeError(f"dataset.buckets: {name} images: {error}") from error
    train, evaluated = padded
    return replace(raw, train=train, eval=evaluated)


def _padded(
    split: Split, buckets: Sequence[Bucket], dataset: DatasetSpec, batch_size: int
) -> Split:
    crop, ignore_index = dataset.oversized == "crop", dataset.ignore_index
    padded = pad_split(split, buckets, ignore_index=ignore_index, crop=crop)
    require_room(batch_size * padded.sample_bytes, f"a padded batch of {batch_size:,}")
    return padded


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


def in_buckets(order: SampleOrder, split: Split, buckets: Sequence[Bucket]) -> SampleOrder:
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
        check_every_bucket_is_used(
            numbers, buckets, order.batch_size if order.drop_remainder else 1
        )
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
    image, label = specs["image"], specs["label"]
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

    The mask is of the image as it was read. Raises RecipeError where ops change its size.
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


def refuse_buckets_that_do_not_fit(parts: StepConfig, state: TrainState, split: Split) -> None:
    """Raise RecipeError where a network has weights that fit one bucket alone."""
    if not parts.buckets:
        return

    def shapes(*shape: int, dtype: object = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    columns = {
        name: shapes(1, *column.shape[1:], dtype=column.dtype)
        for name, column in split.columns.items()
    }
    batch = Batch(columns, shapes(2, dtype=np.uint32), shapes(), shapes(1), shapes())  # type: ignore[arg-type]
    step = make_train_step(parts)
    try:
        jax.eval_shape(step.evaluate, state, batch, jax.eval_shape(step.zero_sums))
    except (ValueError, FlaxError) as error:
        reason = str(error).splitlines()[0]
        raise RecipeError(
            f"dataset.buckets: the network can't take all of them: {reason}; take one bucket, "
            "or a network that averages over positions before its dense layers"
        ) from error


def drawn_specs(ops: Sequence[MapOp], split: Split) -> tuple[ColumnSpec, ...]:
    """Return the spec of a mapped image by size; empty where no op draws one.

    Raises RecipeError that names the op which can't be applied to a size.
    """
    choices = choices_among(ops)
    if choices == 1:
        return ()
    try:
        lists = [chosen_ops(ops, number) for number in range(choices)]
        return tuple(column_specs(chosen, split.specs())["image"] for chosen in lists)
    except ValueError as error:
        raise RecipeError(f"dataset.train.{error}") from error


def like_evaluation(
    train: Mapping[str, ColumnSpec], evaluated: Mapping[str, ColumnSpec]
) -> dict[str, ColumnSpec]:
    """Return the specs of training in the size of evaluation, which the network is built for."""
    image, label = train["image"], train["label"]
    channel = 2 if image.layout == "hwc" else 0
    wanted = evaluated["image"]
    if (image.layout, image.shape[channel]) == (wanted.layout, wanted.shape[channel]):
        image = replace(image, shape=wanted.shape)
    if len(label.shape) == len(evaluated["label"].shape):
        label = replace(label, shape=evaluated["label"].shape)
    return {**train, "image": image, "label": label}


def refuse_sizes_that_do_not_fit(parts: StepConfig, state: TrainState, split: Split) -> None:
    """Raise RecipeError where a network has weights that fit one size alone."""
    choices = choices_among(parts.train_ops)
    if choices == 1:
        return
    (position,) = (n for n, op in enumerate(parts.train_ops) if op.choices > 1)
    where = f"dataset.train.ops.{position} ({parts.train_ops[position].name})"
    if parts.curvature is not None:
        problem = "can't be had with an optimizer that looks at the inputs of layers; take another"
        raise RecipeError(f"{where}: {problem}")
    num_shards = 1 if parts.shards is None else parts.shards.count
    count = batch_multiple(parts.accumulate, num_shards)

    def shapes(*shape: int, dtype: object = np.int32) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, dtype)

    columns = {
        name: shapes(count, *column.shape[1:], dtype=column.dtype)
        for name, column in split.columns.items()
    }
    sample = shapes(count)
    batch = Batch(columns, shapes(2, dtype=np.uint32), shapes(), sample, shapes())  # type: ignore[arg-type]
    for number in range(choices):
        chosen = replace(parts, train_ops=chosen_ops(parts.train_ops, number), shards=None)
        try:
            jax.eval_shape(partial(gradients_of, chosen), state, batch)
        except (ValueError, TypeError, FlaxError) as error:
            reason = str(error).splitlines()[0]
            raise RecipeError(
                f"{where}: the network can't take all sizes: {reason}; take a network that "
                "averages over positions before its dense layers"
            ) from error
