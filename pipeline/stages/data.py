"""Data: read the dataset that the recipe names, and derive the order of its samples."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import fields, replace
from typing import Any, Literal

import numpy as np

from pipeline.backends.feed.feed import split_bytes
from pipeline.config.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.config.run_length import total_steps
from pipeline.core.errors import RecipeError
from pipeline.core.reporter import Reporter
from pipeline.data.balanced_order import BalancedOrder
from pipeline.data.columns import IMAGES, ColumnSpec, RawData, Split
from pipeline.data.dataset import Dataset
from pipeline.data.dataset_spec import BatchOp, MapOp
from pipeline.data.interleaved_order import InterleavedOrder
from pipeline.data.order import SampleOrder
from pipeline.data.padding.buckets import Bucket, canvas, in_ascending_order
from pipeline.data.pixel_labels import moving_labels
from pipeline.data.random import seed_words
from pipeline.data.tables.encode_table import encoding_ops
from pipeline.data.targets import Targets
from pipeline.data.transform import (
    apply_ops,
    choices_among,
    chosen_ops,
    column_specs,
    draw_choice,
)
from pipeline.stages.image_sizes import (
    bucket_line,
    drawn_specs,
    in_buckets,
    like_evaluation,
    pad_images,
    refuse_moved_padding,
    refuse_useless_buckets,
    specs_in,
    with_mask_channel,
)

COUNTED_SAMPLES = 1024
"""Samples whose labels are counted at once."""


def load_data(recipe: Recipe, reporter: Reporter) -> Dataset:
    """Read the dataset.

    Raises DataError for what can't be read and RecipeError for what can't be fed.
    """
    with reporter.clock(f"reading {recipe.dataset.name}"):
        raw = recipe.dataset.read(cache_root(recipe.cache))
    return _ordered(recipe, raw, reporter)


def declare_data(recipe: Recipe, reporter: Reporter) -> Dataset | None:
    """Return the dataset without its samples, if these would be downloaded and no stage reads any.

    Raises RecipeError for what can't be fed.
    """
    raw = None if _reads_samples(recipe) else recipe.dataset.declare(cache_root(recipe.cache))
    if raw is None:
        return None
    dataset = _ordered(recipe, raw, reporter)
    reporter.stage("data", "not downloaded: no stage reads samples, and the sizes are known")
    return dataset


def _reads_samples(recipe: Recipe) -> bool:
    """Whether a stage reads samples, or what is built depends on them.

    The data stage by itself reads them: it is all that is left to do.
    """
    read = {"train", "eval"} & set(recipe.stages) or "build" not in recipe.stages
    dataset = recipe.dataset
    return bool(
        read or recipe.train.loss.counts_classes or dataset.train.balance or dataset.buckets
    )


def _ordered(recipe: Recipe, raw: RawData, reporter: Reporter) -> Dataset:
    """Return the dataset of what was read: map ops, and the order of samples."""
    buckets = in_ascending_order(recipe.dataset.buckets or ())
    raw = pad_images(raw, buckets, recipe.dataset, recipe.train.batch_size)
    for bucket in buckets or (None,):  # the largest is the last
        train_ops, mapped = _mapped(recipe, raw, "train", bucket)
        eval_ops, mapped_eval = _mapped(recipe, raw, "eval", bucket)
        drawn = drawn_specs(train_ops, raw.train)
        if drawn:
            mapped = like_evaluation(mapped, mapped_eval)
        image = _one_image(mapped["image"], mapped_eval["image"])
        if bucket is not None and recipe.dataset.padding_mask:
            image = with_mask_channel(image, bucket)
            refuse_moved_padding(recipe.dataset)
    plain = _train_order(recipe, raw.train)
    if recipe.dataset.train.balance:
        plain = _balanced(plain, raw)
    refuse_useless_buckets(plain, raw.train, buckets)
    order = in_buckets(plain, raw.train, buckets)
    evaluated = _evaluated(recipe, raw.eval, order)
    targets = raw.targets
    if recipe.train.loss.counts_classes:
        targets = _counted(raw, recipe.dataset.ignore_index)
    dataset = Dataset(
        train=raw.train,
        eval=evaluated,
        targets=targets,
        image=image,
        train_images=drawn,
        train_label=mapped["label"],
        eval_label=mapped_eval["label"],
        train_order=order,
        eval_order=in_buckets(_eval_order(recipe, len(evaluated)), evaluated, buckets),
        train_ops=train_ops,
        eval_ops=eval_ops,
        raw_image=_as_given(raw.eval.specs(), buckets),
        whole_eval=raw.eval,
        table=raw.table,
        unit=raw.unit,
        text=raw.text,
    )
    reporter.stage("data", f"{recipe.dataset.name}: {_line(raw, dataset)}")
    if raw.table is not None:
        reporter.stage("data", f"columns: {raw.table}")
    for note in raw.notes:
        reporter.stage("data", note)
    if buckets:
        reporter.stage("data", bucket_line(raw.train, buckets, raw.unit.samples))
    return dataset


def _as_given(specs: Mapping[str, ColumnSpec], buckets: Sequence[Bucket]) -> ColumnSpec:
    return specs_in(canvas(buckets), specs)["image"] if buckets else specs["image"]


def _evaluated(recipe: Recipe, split: Split, order: SampleOrder) -> Split:
    """Return the part of the evaluation split that `eval.samples` requests."""
    wanted = recipe.eval.samples
    if wanted == "trained" and "train" in recipe.stages:
        wanted = total_steps(recipe.train, order.steps_per_pass) * order.batch_size
    if isinstance(wanted, str) or wanted >= len(split):
        return split
    rows = np.arange(wanted) * len(split) // wanted
    return Split({name: column[rows] for name, column in split.columns.items()})


def sample_images(recipe: Recipe, dataset: Dataset) -> np.ndarray:
    """Return the first training images as the network will see them, float32 (n, H, W, C).

    There are none of samples that are no images.
    """
    if dataset.unit != IMAGES or len(dataset.image.shape) != 3:
        return np.zeros((0, 1, 1, 1), np.float32)
    batches = dataset.train_order.batches(0, 1)
    count, keys, rows = recipe.monitor.sample_images, batches.indices[0], batches.rows[0]
    if not any(isinstance(op, BatchOp) for op in dataset.train_ops):
        keys, rows = keys[:count], rows[:count]  # Else all of the batch is mixed, as in training.
    columns = {name: column[rows] for name, column in dataset.train.columns.items()}
    seed = seed_words(recipe.seed)
    choices = choices_among(dataset.train_ops)
    ops = chosen_ops(dataset.train_ops, int(draw_choice(np, choices, seed, 0)))
    images = apply_ops(np, ops, columns, seed, batches.passes[0], keys)["image"]
    images = images[:count].astype(np.float32)
    return images if dataset.image.layout == "hwc" else images.transpose(0, 2, 3, 1)


def _mapped(
    recipe: Recipe, raw: RawData, key: Literal["train", "eval"], bucket: Bucket | None
) -> tuple[tuple[MapOp, ...], dict[str, ColumnSpec]]:
    """Return the ops of a split, and the column specs after them, for images of a bucket.

    The rows of a table are encoded before all other ops.
    """
    split = raw.train if key == "train" else raw.eval
    wanted = recipe.dataset.train.ops if key == "train" else recipe.dataset.eval.ops
    encode = encoding_ops(raw.table, recipe.model.table_input)
    specs = split.specs() if bucket is None else specs_in(bucket, split.specs())
    specs = column_specs(encode, specs)
    try:
        ops = moving_labels(wanted, specs, recipe.dataset.ignore_index)
        return (*encode, *ops), column_specs(ops, specs)
    except ValueError as error:
        raise RecipeError(f"dataset.{key}.{error}") from error


def _one_image(train: ColumnSpec, evaluated: ColumnSpec) -> ColumnSpec:
    if (train.shape, train.layout) != (evaluated.shape, evaluated.layout):
        raise RecipeError(
            f"dataset.eval.ops: leave images of shape {evaluated.shape}, "
            f"dataset.train.ops of {train.shape}; a network takes one shape"
        )
    return train


def _train_order(recipe: Recipe, split: Split) -> SampleOrder:
    wanted = recipe.dataset.train
    settings: dict[str, Any] = {
        "seed": recipe.seed,
        "samples": len(split),
        "batch_size": recipe.train.batch_size,
        "shuffle": wanted.shuffle,
        "buffer_size": wanted.buffer_size,
        "drop_remainder": wanted.drop_remainder,
        "repeat": wanted.repeat,
        "num_shards": wanted.num_shards or 1,
        "shard_id": wanted.shard_id or 0,
    }
    if wanted.interleave is not None and not split.files:
        raise RecipeError(
            f"dataset.train.interleave = {wanted.interleave}: must be null, since "
            f"{recipe.dataset.name} does not read samples from files one after the other; "
            "tfrecord and records do"
        )
    if wanted.interleave is not None and len(split.files) < settings["num_shards"]:
        raise RecipeError(
            f"dataset.train.num_shards = {wanted.num_shards}: must be {len(split.files)} at "
            "most, since with interleave each shard reads files of its own"
        )
    try:
        if wanted.interleave is None:
            return SampleOrder(**settings)
        return InterleavedOrder(**settings, cycle_length=wanted.interleave, files=split.files)
    except ValueError as error:
        raise RecipeError(f"train.batch_size: {error}") from error


def _counted(raw: RawData, ignore_index: int | None) -> Targets:
    """Return the targets, with the number of training labels of each class."""
    labels = raw.train.columns["label"]
    if not np.issubdtype(np.dtype(labels.dtype), np.integer):
        return raw.targets
    counts = np.zeros(len(raw.targets), np.int64)
    for start in range(0, len(raw.train), COUNTED_SAMPLES):
        found = np.asarray(labels[start : start + COUNTED_SAMPLES]).ravel()
        known = found[found != ignore_index]
        counts += np.bincount(known, minlength=len(counts))[: len(counts)]
    return replace(raw.targets, counts=tuple(counts.tolist()))


def _balanced(order: SampleOrder, raw: RawData) -> SampleOrder:
    """Return the order of balanced classes. Raises RecipeError if samples have not one class."""
    labels = raw.train.columns["label"]
    if raw.targets.task != "classification" or len(labels.shape) != 1:
        raise RecipeError(
            "dataset.train.balance = true: must be false where a sample has not one class"
        )
    settings = {field.name: getattr(order, field.name) for field in fields(order)}
    return BalancedOrder(**settings, labels=np.asarray(labels[:]))


def _eval_order(recipe: Recipe, samples: int) -> SampleOrder:
    return SampleOrder(
        seed=recipe.seed,
        samples=samples,
        batch_size=recipe.dataset.eval.batch_size or recipe.train.batch_size,
        shuffle=False,
        buffer_size=None,
        drop_remainder=False,
        repeat=1,
    )


def _line(raw: RawData, dataset: Dataset) -> str:
    unit = raw.unit
    size = unit.size or "x".join(map(str, raw.train.specs()["image"].shape))
    size_mb = (split_bytes(raw.train) + split_bytes(raw.eval)) / 1e6
    order = dataset.train_order
    shard = f" in shard {order.shard_id} of {order.num_shards}" if order.num_shards > 1 else ""
    part = "" if dataset.eval is raw.eval else f"{len(dataset.eval):,} of "
    return (
        f"{len(raw.train):,} training and {part}{len(raw.eval):,} evaluation {unit.samples} "
        f"{size}, {raw.targets}, {size_mb:,.1f} MB; {order.steps_per_pass:,} steps a pass{shard}"
    )
