"""Rules about differential privacy: what may read training samples, and what mixes them."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.precision import resolve_loss_scale
from pipeline.config.recipe import Recipe
from pipeline.core.files.value_text import show
from pipeline.data.dataset_spec import BatchOp
from pipeline.engine.callbacks.events import TRAINED

Problem = tuple[str, object, str]
"""A key, its value, and what the value must be."""


def check_privacy(recipe: Recipe) -> Iterator[str]:
    """In a private run only noisy gradients depend on training samples, each on its own."""
    if recipe.privacy is not None:
        for key, value, rule in (*_find_mixing(recipe), *_find_reading(recipe)):
            yield f"{key} = {show(value)}: {rule} with privacy"


def _find_mixing(recipe: Recipe) -> Iterator[Problem]:
    """Yield the keys that may make a gradient depend on several samples."""
    train = recipe.train
    split = recipe.dataset.train
    scale = resolve_loss_scale(recipe)
    if train.loss.reduction != "mean":
        yield "train.loss.reduction", train.loss.reduction, "must be mean"
    if train.loss.hardest_share < 1:
        rule = "chooses samples by the others; must be 1.0"
        yield "train.loss.hardest_share", train.loss.hardest_share, rule
    if scale.initial != 1 or scale.skips_overflow:
        yield "train.loss_scale", scale.name, "must be 1, as gradients are clipped in float32,"
    if train.on_nan.name != "stop":
        rule = "must be stop, as gradients that aren't finite count as 0,"
        yield "train.on_nan", train.on_nan.name, rule
    if train.gradients.name != "plain":
        rule = "must be plain, as each sample's gradient is clipped,"
        yield "train.gradients", train.gradients.name, rule
    if train.optimizer.observes_layers:
        rule = "reads samples without noise; must be another optimizer"
        yield "train.optimizer", train.optimizer.name, rule
    if train.remat != "none":
        yield "train.remat", train.remat, "must be none"
    if train.jit_layers:
        yield "train.jit_layers", list(train.jit_layers), "must be []"
    if recipe.parallel.mode not in ("none", "data"):
        yield "parallel.mode", recipe.parallel.mode, "must be none or data"
    if not recipe.parallel.mirror_mean:
        yield "parallel.mirror_mean", False, "must be true"
    if recipe.dataset.buckets:
        yield "dataset.buckets", "set", "must be null"
    for position, op in enumerate(split.ops):
        if isinstance(op, BatchOp):
            key = f"dataset.train.ops.{position} ({op.name})"
            yield key, op.name, "mixes samples; must be another op"
    plain = {"balance": False, "interleave": None, "num_shards": None, "repeat": 1}
    for name, value in plain.items():
        if getattr(split, name) != value:
            yield f"dataset.train.{name}", getattr(split, name), f"must be {show(value)}"


def _find_reading(recipe: Recipe) -> Iterator[Problem]:
    """Yield the keys that release something about training samples without noise."""
    train = recipe.train
    monitor = recipe.monitor
    if train.loss.counts_classes:
        rule = "counts training labels; must be a loss without weights of classes"
        yield "train.loss", train.loss.name, rule
    if train.ledger:
        yield "train.ledger", True, "releases losses of samples; must be false"
    if recipe.eval.on_train:
        yield "eval.on_train", True, "releases metrics of samples; must be false"
    if (monitor.early_stop.metric or "").startswith(TRAINED):
        rule = "stops by training samples; must be a metric of evaluation samples"
        yield "monitor.early_stop.metric", monitor.early_stop.metric, rule
    if monitor.tensorboard and monitor.sample_images > 0:
        yield "monitor.sample_images", monitor.sample_images, "writes training images; must be 0"
    if monitor.collect_every is not None:
        rule = "writes gradients without noise; must be null"
        yield "monitor.collect_every", monitor.collect_every, rule
    if recipe.checkpoint.mirror is not None:
        rule = "copies the seed of the noise; must be null"
        yield "checkpoint.mirror", recipe.checkpoint.mirror, rule
    if recipe.dump.steps is not None:
        yield "dump.steps", recipe.dump.steps, "must be null"
    for position, callback in enumerate(train.callbacks):
        metric = getattr(callback, "metric", None)
        if str(metric).startswith(TRAINED):
            key = f"train.callbacks.{position} ({callback.name}).metric"
            rule = "decides by training samples; must be a metric of evaluation samples"
            yield key, metric, rule
    for position, callback in enumerate(train.callbacks):
        if not type(callback).__module__.startswith("pipeline."):
            rule = "reads losses of training samples; must be one of this package"
            yield f"train.callbacks.{position}", callback.name, rule
