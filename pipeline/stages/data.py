"""Data: read what the recipe names and settle the order in which it will be seen."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from pipeline.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.data.buckets import Bucket, in_ascending_order
from pipeline.data.columns import ColumnSpec, RawData, Split
from pipeline.data.feed import split_bytes
from pipeline.data.order import Order
from pipeline.data.random import seed_words
from pipeline.data.spec import BatchOp, Ops
from pipeline.data.transform import apply_ops, column_specs
from pipeline.errors import RecipeError
from pipeline.observe.reporter import Reporter
from pipeline.sink.schedule import total_steps
from pipeline.stages.padding import (
    bucket_line,
    in_buckets,
    pad_images,
    refuse_useless_buckets,
    with_mask_channel,
)


@dataclass(frozen=True)
class Dataset:
    """Both splits as read, what image and label are after map ops, and the order of samples."""

    train: Split
    eval: Split
    classes: tuple[str, ...]
    image: ColumnSpec
    train_label: ColumnSpec
    eval_label: ColumnSpec
    train_order: Order
    eval_order: Order

    @property
    def label_positions(self) -> tuple[int, ...]:
        """At which positions of a sample a label stands: () where it has one label."""
        shape = self.eval_label.shape
        return shape if np.issubdtype(self.eval_label.dtype, np.integer) else shape[:-1]


def load_data(recipe: Recipe, reporter: Reporter) -> Dataset:
    """Read the dataset.

    Raises DataError for what can't be read and RecipeError for what can't be fed.
    """
    with reporter.clock(f"reading {recipe.dataset.name}"):
        raw = recipe.dataset.read(cache_root(recipe.cache))
    buckets = in_ascending_order(recipe.dataset.buckets or ())
    raw = pad_images(raw, buckets)
    for bucket in buckets or (None,):  # the largest is the last
        mapped = _mapped(raw.train, recipe.dataset.train.ops, "train", bucket)
        mapped_eval = _mapped(raw.eval, recipe.dataset.eval.ops, "eval", bucket)
        image = _one_image(mapped["image"], mapped_eval["image"])
        if bucket is not None and recipe.dataset.padding_mask:
            image = with_mask_channel(image, bucket)
    plain = _train_order(recipe, len(raw.train))
    refuse_useless_buckets(plain, raw.train, buckets)
    order = in_buckets(plain, raw.train, buckets)
    evaluated = _evaluated(recipe, raw.eval, order)
    dataset = Dataset(
        train=raw.train,
        eval=evaluated,
        classes=raw.classes,
        image=image,
        train_label=mapped["label"],
        eval_label=mapped_eval["label"],
        train_order=order,
        eval_order=in_buckets(_eval_order(recipe, len(evaluated)), evaluated, buckets),
    )
    reporter.stage("data", _line(recipe, raw, dataset))
    if buckets:
        reporter.stage("data", bucket_line(raw.train, buckets))
    return dataset


def _evaluated(recipe: Recipe, split: Split, order: Order) -> Split:
    """The part of the evaluation split that `eval.samples` asks for."""
    wanted = recipe.eval.samples
    if wanted == "trained" and "train" in recipe.stages:
        wanted = total_steps(recipe.train, order.steps_per_pass) * order.batch_size
    if isinstance(wanted, str) or wanted >= len(split):
        return split
    rows = np.arange(wanted) * len(split) // wanted
    return Split({name: column[rows] for name, column in split.columns.items()})


def sample_images(recipe: Recipe, dataset: Dataset) -> np.ndarray:
    """The first training images as the network will see them, float32 (n, H, W, C)."""
    batches = dataset.train_order.batches(0, 1)
    wanted, rows = recipe.monitor.sample_images, batches.indices[0]
    if not any(isinstance(op, BatchOp) for op in recipe.dataset.train.ops):
        rows = rows[:wanted]  # Else all of the batch is mixed, as in training.
    columns = {name: column[rows] for name, column in dataset.train.columns.items()}
    ops, seed = recipe.dataset.train.ops, seed_words(recipe.seed)
    images = apply_ops(np, ops, columns, seed, batches.passes[0], rows)["image"]
    images = images[:wanted].astype(np.float32)
    return images if dataset.image.layout == "hwc" else images.transpose(0, 2, 3, 1)


def _mapped(split: Split, ops: Ops, key: str, bucket: Bucket | None) -> dict[str, ColumnSpec]:
    """What the columns are behind the ops, where images are as large as a bucket."""
    specs = split.specs()
    if bucket is not None:
        shape = (*bucket, *specs["image"].shape[len(bucket) :])
        specs["image"] = replace(specs["image"], shape=shape)
    try:
        return column_specs(ops, specs)
    except ValueError as error:
        raise RecipeError([f"dataset.{key}.{error}"]) from error


def _one_image(train: ColumnSpec, evaluated: ColumnSpec) -> ColumnSpec:
    if (train.shape, train.layout) != (evaluated.shape, evaluated.layout):
        raise RecipeError(
            [
                f"dataset.eval.ops: leave images of shape {evaluated.shape}, "
                f"dataset.train.ops of {train.shape}; a network takes one shape"
            ]
        )
    return train


def _train_order(recipe: Recipe, samples: int) -> Order:
    split = recipe.dataset.train
    try:
        return Order(
            seed=recipe.seed,
            samples=samples,
            batch_size=recipe.train.batch_size,
            shuffle=split.shuffle,
            buffer_size=split.buffer_size,
            drop_remainder=split.drop_remainder,
            repeat=split.repeat,
            num_shards=split.num_shards or 1,
            shard_id=split.shard_id or 0,
        )
    except ValueError as error:
        raise RecipeError([f"train.batch_size: {error}"]) from error


def _eval_order(recipe: Recipe, samples: int) -> Order:
    return Order(
        seed=recipe.seed,
        samples=samples,
        batch_size=recipe.dataset.eval.batch_size or recipe.train.batch_size,
        shuffle=False,
        buffer_size=None,
        drop_remainder=False,
        repeat=1,
    )


def _line(recipe: Recipe, raw: RawData, dataset: Dataset) -> str:
    shape = "x".join(map(str, raw.train.specs()["image"].shape))
    size_mb = (split_bytes(raw.train) + split_bytes(raw.eval)) / 1e6
    order = dataset.train_order
    shard = f" in shard {order.shard_id} of {order.num_shards}" if order.num_shards > 1 else ""
    part = "" if dataset.eval is raw.eval else f"{len(dataset.eval):,} of "
    return (
        f"{recipe.dataset.name}: {len(raw.train):,} training and {part}{len(raw.eval):,} "
        f"evaluation images {shape}, {len(raw.classes)} classes, {size_mb:,.1f} MB; "
        f"{order.steps_per_pass:,} steps a pass{shard}"
    )
