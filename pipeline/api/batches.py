"""Batches of a recipe's data as numpy arrays, equal to the batches of training."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Literal

import numpy as np

from pipeline.config.recipe import Recipe
from pipeline.data.dataset import Dataset
from pipeline.data.host_ops import read_rows
from pipeline.data.random import seed_words
from pipeline.data.transform import apply_ops, count_choices, draw_choice, select_ops

SplitName = Literal["train", "eval"]


def dict_batches(
    recipe: Recipe, dataset: Dataset, split: SplitName = "train", epoch: int = 0
) -> Iterator[dict[str, np.ndarray]]:
    """Yield the batches of an epoch of a split after its map ops, by column.

    Images are float32 (B, H, W, C), as the network reads them. The last batch may be smaller.
    `epoch` counts from 0. Order and random augmentation are the same as in that epoch of training.
    """
    is_train = split == "train"
    order = dataset.train_order if is_train else dataset.eval_order
    ops = dataset.train_ops if is_train else dataset.eval_ops
    columns = (dataset.train if is_train else dataset.eval).columns
    seed = seed_words(recipe.seed)
    first_step = epoch * order.steps_per_epoch
    for step in range(first_step, first_step + order.steps_per_epoch):
        batches = order.batches(step, 1)
        count = int(batches.counts[0])
        raw = {
            name: read_rows(column, batches.rows[0], batches.indices[0], int(batches.epochs[0]))
            for name, column in columns.items()
        }
        step_ops = select_ops(ops, int(draw_choice(np, count_choices(ops), seed, step)))
        mapped = apply_ops(np, step_ops, raw, seed, batches.epochs[0], batches.indices[0])
        images = np.asarray(mapped["image"], np.float32)
        if dataset.image.layout != "hwc":
            images = images.transpose(0, 2, 3, 1)
        yield {name: array[:count] for name, array in {**mapped, "image": images}.items()}


def tuple_batches(
    recipe: Recipe, dataset: Dataset, split: SplitName = "train", epoch: int = 0
) -> Iterator[tuple[np.ndarray, ...]]:
    """Yield the batches of `dict_batches` as tuples: image, label and any other columns."""
    for batch in dict_batches(recipe, dataset, split, epoch):
        image = batch.pop("image")
        yield (image, batch.pop("label"), *batch.values())
