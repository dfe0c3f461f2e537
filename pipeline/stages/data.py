"""Data: read what the recipe names and settle the order in which it will be seen."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from pipeline.cache import cache_root
from pipeline.config.recipe import Recipe
from pipeline.data.columns import ColumnSpec, RawData, Split
from pipeline.data.feed import split_bytes
from pipeline.data.order import Order
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops, column_specs
from pipeline.errors import RecipeError
from pipeline.observe.reporter import Reporter


@dataclass(frozen=True)
class Dataset:
    """Both splits as read, what one image is after the map ops, and the order of samples."""

    train: Split
    eval: Split
    classes: tuple[str, ...]
    image: ColumnSpec
    train_order: Order
    eval_order: Order


def load_data(recipe: Recipe, reporter: Reporter) -> Dataset:
    """Read the dataset.

    Raises DataError for what can't be read and RecipeError for what can't be fed.
    """
    with reporter.clock(f"reading {recipe.dataset.name}"):
        raw = recipe.dataset.read(cache_root(recipe.cache))
    dataset = Dataset(
        raw.train,
        raw.eval,
        raw.classes,
        _image(recipe, raw),
        _train_order(recipe, len(raw.train)),
        _eval_order(recipe, len(raw.eval)),
    )
    reporter.stage("data", _line(recipe, raw, dataset))
    return dataset


def sample_images(recipe: Recipe, dataset: Dataset) -> np.ndarray:
    """The first training images as the network will see them, float32 (n, H, W, C)."""
    batches = dataset.train_order.batches(0, 1)
    rows = batches.indices[0][: recipe.monitor.sample_images]
    columns = {name: column[rows] for name, column in dataset.train.columns.items()}
    ops, seed = recipe.dataset.train.ops, seed_words(recipe.seed)
    images = apply_ops(np, ops, columns, seed, batches.passes[0], rows)["image"]
    images = images.astype(np.float32)
    return images if dataset.image.layout == "hwc" else images.transpose(0, 2, 3, 1)


def _image(recipe: Recipe, raw: RawData) -> ColumnSpec:
    splits = {"train": (raw.train, recipe.dataset.train), "eval": (raw.eval, recipe.dataset.eval)}
    images = {}
    for key, (split, spec) in splits.items():
        try:
            images[key] = column_specs(spec.ops, split.specs())["image"]
        except ValueError as error:
            raise RecipeError([f"dataset.{key}.{error}"]) from error
    if images["train"] != images["eval"]:
        raise RecipeError(
            [
                f"dataset.eval.ops: leave {images['eval']}, dataset.train.ops {images['train']}; "
                "a network takes one shape"
            ]
        )
    return images["train"]


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
    height_width = "x".join(map(str, raw.train.specs()["image"].shape))
    size_mb = (split_bytes(raw.train) + split_bytes(raw.eval)) / 1e6
    return (
        f"{recipe.dataset.name}: {len(raw.train):,} training and {len(raw.eval):,} evaluation "
        f"images {height_width}, {len(raw.classes)} classes, {size_mb:,.1f} MB; "
        f"{dataset.train_order.steps_per_pass:,} steps a pass"
    )
