"""Rules about privacy and robustness: settings of private runs, and attacks on images.

A rule yields the settings with which a run can't be differentially private, or with which images
can't be attacked, in adversarial training and in the evaluation.
"""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import resolve_loss_scale, resolve_precision
from pipeline.core.files.value_text import show
from pipeline.data.dataset_spec import BatchOp
from pipeline.engine.callbacks.callback import TRAINED
from pipeline.models.layers.model_spec import walk_layers
from pipeline.training.robustness.attack_specs import (
    AdversarialSpec,
    complete_attacks,
    find_norm_problem,
)

Refusal = tuple[str, object, str]
"""(key, its value, rule). A rule ends in "must be ...", after the reason if there is one."""
ADVERSARIAL = "train.adversarial"


def check_privacy(recipe: Recipe) -> Iterator[str]:
    """Yield the problems of a private run's settings.

    Whatever the run computes from training samples must have the noise of its gradients. Before
    that, each sample's gradient is clipped, so it must not depend on other samples.
    """
    if recipe.privacy is None:
        return
    for check in (_check_step, _check_data, _check_outputs):
        for key, value, rule in check(recipe):
            yield f"{key} = {show(value)}: {rule} with privacy"


def _check_step(recipe: Recipe) -> Iterator[Refusal]:
    """Yield the keys with which a step can't clip each sample's gradient and add the noise."""
    train = recipe.train
    loss = train.loss
    scale = resolve_loss_scale(recipe)
    if loss.reduction != "mean":
        yield "train.loss.reduction", loss.reduction, "must be mean"
    if loss.hardest_share < 1:
        rule = "compares the losses of samples; must be 1.0"
        yield "train.loss.hardest_share", loss.hardest_share, rule
    if loss.compares_samples:
        yield "train.loss", loss.name, "compares samples with each other; must be another loss"
    if scale.initial != 1 or scale.skips_overflow:
        yield "train.loss_scale", scale.name, "gradients are clipped in float32; must be 1"
    if train.on_nan.name != "stop":
        yield "train.on_nan", train.on_nan.name, "non-finite gradients count as 0; must be stop"
    if train.gradients.name != "plain":
        rule = "each sample's gradient is clipped; must be plain"
        yield "train.gradients", train.gradients.name, rule
    if train.optimizer.observes_layers:
        rule = "reads samples without noise; must be another optimizer"
        yield "train.optimizer", train.optimizer.name, rule
    if train.remat != "none":
        yield "train.remat", train.remat, "must be none"
    if resolve_precision(recipe).products != "plain":
        rule = "scales samples together; must be another level"
        yield "train.precision", train.precision, rule
    if train.jit_layers:
        yield "train.jit_layers", list(train.jit_layers), "must be []"
    if recipe.parallel.mode not in ("none", "data"):
        yield "parallel.mode", recipe.parallel.mode, "must be none or data"
    adding = [layer.name for layer in walk_layers(recipe.model) if layer.adds_losses]
    if adding:
        yield (
            "model.layers",
            adding[0],
            "adds losses inside of the network; their weights must be 0",
        )
    if not recipe.parallel.mirror_mean:
        yield "parallel.mirror_mean", False, "must be true"


def _check_data(recipe: Recipe) -> Iterator[Refusal]:
    """Yield the keys of the dataset with which samples are mixed, repeated or selected."""
    split = recipe.dataset.train
    if recipe.dataset.buckets:
        yield "dataset.buckets", "set", "must be null"
    for position, op in enumerate(split.ops):
        if isinstance(op, BatchOp):
            key = f"dataset.train.ops.{position} ({op.name})"
            yield key, op.name, "mixes samples; must be another op"
    defaults = {"balance": False, "interleave": None, "num_shards": None, "repeat": 1}
    for name, default in defaults.items():
        value = getattr(split, name)
        if value != default:
            yield f"dataset.train.{name}", value, f"must be {show(default)}"


def _check_outputs(recipe: Recipe) -> Iterator[Refusal]:
    """Yield the keys that release the noise's seed, or use or release samples without noise."""
    monitor = recipe.monitor
    loss = recipe.train.loss
    stop_metric = monitor.early_stop.metric
    metric_rule = "must be a metric of evaluation samples"
    if loss.needs_class_counts:
        rule = "counts training labels; must be a loss without weights of classes"
        yield "train.loss", loss.name, rule
    if recipe.train.ledger:
        yield "train.ledger", True, "releases losses of samples; must be false"
    if recipe.eval.on_train:
        yield "eval.on_train", True, "releases metrics of samples; must be false"
    if stop_metric is not None and stop_metric.startswith(TRAINED):
        yield "monitor.early_stop.metric", stop_metric, f"stops by training samples; {metric_rule}"
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
    for position, callback in enumerate(recipe.train.callbacks):
        key = f"train.callbacks.{position}"
        metric = str(getattr(callback, "metric", ""))
        if metric.startswith(TRAINED):
            rule = f"decides by training samples; {metric_rule}"
            yield f"{key} ({callback.name}).metric", metric, rule
        if not type(callback).__module__.startswith("pipeline."):
            rule = "reads losses of training samples; must be one of this package"
            yield key, callback.name, rule


def check_robustness(recipe: Recipe) -> Iterator[str]:
    """Attacked samples are images of one size, and map ops keep the scale of pixels computable."""
    adversarial = recipe.train.adversarial
    if adversarial is not None:
        yield from _check_images(recipe, ADVERSARIAL, "train", "null")
    if recipe.eval.robustness:
        yield from _check_images(recipe, "eval.robustness", "eval", "[]")
        try:
            complete_attacks(recipe.eval.robustness, adversarial)
        except ValueError as error:
            yield f"eval.robustness.{error}"
    if adversarial is not None:
        yield from _check_training(recipe, adversarial)


def _check_images(recipe: Recipe, key: str, split: str, default: str) -> Iterator[str]:
    """Yield the reasons why samples of a split can't be attacked.

    `key` sets the attacks; its `default` attacks nothing.
    """
    dataset = recipe.dataset
    if dataset.content != "images":
        reason = f"attacks change pixels, and dataset = {dataset.name} has {dataset.content}"
        yield f"{key}: {reason}; must be {default}"
        return
    if dataset.buckets:
        yield f"{key}: needs images of one size; dataset.buckets must be null"
    from pipeline.training.robustness.adversarial_rule import find_pixel_scale

    try:
        find_pixel_scale(getattr(dataset, split).ops, 1.0)
    except ValueError as error:
        yield f"dataset.{split}.{error} with {key}"


def _check_training(recipe: Recipe, adversarial: AdversarialSpec) -> Iterator[str]:
    """Yield the problems of the attack's norm, and of keys that exclude adversarial training."""
    train = recipe.train
    norm_problem = find_norm_problem(adversarial.norm, adversarial.radius)
    if norm_problem is not None:
        yield f"{ADVERSARIAL}.{norm_problem}"
    problem = f"{ADVERSARIAL} = {adversarial.attack}: must be null with"
    if recipe.privacy is not None:
        yield (
            f"{problem} privacy, since an attack reads gradients of samples without the noise of "
            "the private step"
        )
    if train.optimizer.observes_layers:
        yield f"{problem} {train.optimizer.name}, which looks into layers"
    if train.mode == "eager":
        yield f"{problem} train.mode = eager, which compiles no loop"
    if recipe.parallel.mode not in ("none", "data"):
        yield f"{problem} parallel.mode = {recipe.parallel.mode}; it can be data"
    if recipe.dump.steps is not None:
        yield f"{problem} dump.steps, as dumps have images without attack"
