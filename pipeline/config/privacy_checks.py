"""Rules about differential privacy: what may read training samples, and what mixes them."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.precision import resolve_loss_scale
from pipeline.config.recipe import Recipe
from pipeline.core.files.value_text import show
from pipeline.data.dataset_spec import BatchOp
from pipeline.engine.callbacks.events import TRAINED


def check_privacy(recipe: Recipe) -> Iterator[str]:
    """In a private run only noisy gradients depend on training samples, each on its own."""
    if recipe.privacy is None:
        return
    for key, (is_refused, value, rule) in {
        **_list_mixing_keys(recipe),
        **_list_reading_keys(recipe),
    }.items():
        if is_refused:
            yield f"{key} = {show(value)}: {rule} with privacy"


def _list_mixing_keys(recipe: Recipe) -> dict[str, tuple[bool, object, str]]:
    """Return the keys that may make a gradient depend on several samples, by key: whether the value
    is refused, the value, and what it must be."""
    train = recipe.train
    split = recipe.dataset.train
    parallel = recipe.parallel
    scale = resolve_loss_scale(recipe)
    loss = train.loss
    return {
        "train.loss.reduction": (loss.reduction != "mean", loss.reduction, "must be mean"),
        "train.loss.hardest_share": (
            loss.hardest_share < 1,
            loss.hardest_share,
            "chooses samples by the others; must be 1.0",
        ),
        "train.loss_scale": (
            scale.initial != 1 or scale.skips_overflow,
            scale.name,
            "must be 1, as gradients are clipped in float32,",
        ),
        "train.on_nan": (
            train.on_nan.name != "stop",
            train.on_nan.name,
            "must be stop, as gradients that aren't finite count as 0,",
        ),
        "train.gradients": (
            train.gradients.name != "plain",
            train.gradients.name,
            "must be plain, as each sample's gradient is clipped,",
        ),
        "train.optimizer": (
            train.optimizer.observes_layers,
            train.optimizer.name,
            "reads samples without noise; must be another optimizer",
        ),
        "train.remat": (train.remat != "none", train.remat, "must be none"),
        "train.jit_layers": (bool(train.jit_layers), list(train.jit_layers), "must be []"),
        "parallel.mode": (
            parallel.mode not in ("none", "data"),
            parallel.mode,
            "must be none or data",
        ),
        "parallel.mirror_mean": (not parallel.mirror_mean, False, "must be true"),
        "dataset.buckets": (bool(recipe.dataset.buckets), "set", "must be null"),
        **{
            f"dataset.train.ops.{position} ({op.name})": (
                isinstance(op, BatchOp),
                op.name,
                "mixes samples; must be another op",
            )
            for position, op in enumerate(split.ops)
        },
        **{
            f"dataset.train.{name}": (value != none, value, f"must be {show(none)}")
            for name, none, value in (
                ("balance", False, split.balance),
                ("interleave", None, split.interleave),
                ("num_shards", None, split.num_shards),
                ("repeat", 1, split.repeat),
            )
        },
    }


def _list_reading_keys(recipe: Recipe) -> dict[str, tuple[bool, object, str]]:
    """Return the keys that release something about training samples without noise."""
    monitor = recipe.monitor
    loss = recipe.train.loss
    return {
        "train.loss": (
            loss.counts_classes,
            loss.name,
            "counts training labels; must be a loss without weights of classes",
        ),
        "train.ledger": (recipe.train.ledger, True, "releases losses of samples; must be false"),
        "eval.on_train": (recipe.eval.on_train, True, "releases metrics of samples; must be false"),
        "monitor.early_stop.metric": (
            (monitor.early_stop.metric or "").startswith(TRAINED),
            monitor.early_stop.metric,
            "stops by training samples; must be a metric of evaluation samples",
        ),
        "monitor.sample_images": (
            monitor.tensorboard and monitor.sample_images > 0,
            monitor.sample_images,
            "writes training images; must be 0",
        ),
        "monitor.collect_every": (
            monitor.collect_every is not None,
            monitor.collect_every,
            "writes gradients without noise; must be null",
        ),
        "checkpoint.mirror": (
            recipe.checkpoint.mirror is not None,
            recipe.checkpoint.mirror,
            "copies the seed of the noise; must be null",
        ),
        "dump.steps": (recipe.dump.steps is not None, recipe.dump.steps, "must be null"),
        **{
            f"train.callbacks.{position} ({callback.name}).metric": (
                str(getattr(callback, "metric", "")).startswith(TRAINED),
                getattr(callback, "metric", None),
                "decides by training samples; must be a metric of evaluation samples",
            )
            for position, callback in enumerate(recipe.train.callbacks)
        },
        **{
            f"train.callbacks.{position}": (
                not type(callback).__module__.startswith("pipeline."),
                callback.name,
                "reads losses of training samples; must be one of this package",
            )
            for position, callback in enumerate(recipe.train.callbacks)
        },
    }
