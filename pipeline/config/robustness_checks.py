"""Rules about attacks on images, in adversarial training and in the evaluation."""

from __future__ import annotations

from collections.abc import Iterator

from pipeline.config.recipe import Recipe
from pipeline.training.robustness.attack_specs import (
    AdversarialSpec,
    complete_attacks,
    find_norm_problem,
)

ADVERSARIAL = "train.adversarial"


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
    from pipeline.training.robustness.pixel_scale import find_pixel_scale

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
