"""What a recipe with privacy or with attacks may not ask for; all problems in one message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config.compose import load_recipe
from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError
from tests.slow_cases import mark_slow_except

Compose = Callable[..., Recipe]
PRIVACY = "+privacy={noise: 1.0, delta: 1.0e-3}"
KEYS = {
    "train.loss.reduction=sum": "train.loss.reduction = sum: must be mean",
    "train.loss.hardest_share=0.5": (
        "train.loss.hardest_share = 0.5: compares the losses of samples; must be 1.0"
    ),
    "train.loss_scale=128.0": (
        "train.loss_scale = fixed: gradients are clipped in float32; must be 1"
    ),
    "train.on_nan=skip": "train.on_nan = skip: non-finite gradients count as 0; must be stop",
    "train.gradients=sam": (
        "train.gradients = sam: each sample's gradient is clipped; must be plain"
    ),
    "train.remat=auto": "train.remat = auto: must be none",
    "dataset.train.balance=true": "dataset.train.balance = true: must be false",
    "dataset.train.repeat=2": "dataset.train.repeat = 2: must be 1",
    "eval.on_train=true": "eval.on_train = true: releases metrics of samples; must be false",
    "monitor.collect_every=5": "monitor.collect_every = 5: writes gradients without noise",
    "dump.steps=5": "dump.steps = '5': must be null",
    "optimizer=thor": "train.optimizer = thor: reads samples without noise",
}
PGD = "++train.adversarial={attack: pgd, radius: 0.1}"
REFUSED = {
    "privacy": (
        [PGD, "+privacy={noise: 1.0, delta: 1.0e-3}"],
        "train.adversarial = pgd: must be null with privacy, since an attack reads gradients of "
        "samples without the noise of the private step",
    ),
    "eager": ([PGD, "train.mode=eager"], "must be null with train.mode = eager"),
    "thor": ([PGD, "optimizer=thor"], "must be null with thor, which looks into layers"),
    "dumps": ([PGD, "dump.steps='0'"], "must be null with dump.steps"),
    "radius": (
        ["++train.adversarial={attack: pgd, radius: 1.1}"],
        "train.adversarial.radius = 1.1: must be at most 1, the range of a pixel",
    ),
    "no radius": (
        ["++eval.robustness=[{attack: pgd}]"],
        "eval.robustness.0.radius = null: must be a number above 0 without train.adversarial",
    ),
    "square in l2": (
        ["++eval.robustness=[{attack: square, norm: l2, radius: 1.0}]"],
        "eval.robustness.0.norm = l2: must be linf with attack = square",
    ),
    "another attack": (["++eval.robustness=[{attack: deepfool}]"], "eval.robustness.0"),
    "values": (
        [PGD, "dataset.train.ops=[whiten]", "dataset.eval.ops=[whiten]"],
        "dataset.train.ops.0 (whiten): changes values so that they have no radius in pixels; must "
        "be rescale or normalize with train.adversarial",
    ),
}


@pytest.mark.medium
def test_error_lists_all_problems(tiny: Compose) -> None:
    with pytest.raises(RecipeError) as error:
        tiny(PRIVACY, *KEYS, "monitor.early_stop.metric=train_accuracy", "eval.every_steps=5")
    message = str(error.value)
    missing = [problem for problem in KEYS.values() if problem not in message]
    assert not missing, message
    assert "monitor.early_stop.metric = train_accuracy: stops by training samples" in message
    assert message.count("with privacy") == len(KEYS) + 1


@pytest.mark.medium
def test_training_images_are_not_written(tiny: Compose) -> None:
    with pytest.raises(RecipeError, match=r"monitor.sample_images = 4: writes training images"):
        tiny(PRIVACY, "monitor.tensorboard=true", "monitor.sample_images=4")


@pytest.mark.medium
def test_recipe_without_privacy_skips_privacy_rules(tiny: Compose) -> None:
    assert tiny("eval.on_train=true", "train.on_nan=skip").privacy is None


@pytest.mark.parametrize("case", mark_slow_except([*REFUSED][::4], REFUSED))
def test_attacks_with_incompatible_settings_are_refused(
    case: str, tiny: Callable[..., Recipe]
) -> None:
    overrides, problem = REFUSED[case]
    with pytest.raises(RecipeError) as caught:
        tiny(*overrides)
    assert problem in str(caught.value)


def test_attacks_on_tokens_are_refused() -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("gpt_text", [PGD, "++eval.robustness=[{attack: fgsm}]"])
    message = str(caught.value)
    assert "train.adversarial: attacks change pixels, and dataset = text has tokens" in message
    assert "eval.robustness: attacks change pixels, and dataset = text has tokens" in message


def test_recipe_with_attacks_is_accepted(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny(PGD, "++eval.robustness=[{attack: apgd, losses: [ce]}, {attack: corruptions}]")
    assert recipe.train.adversarial is not None
    assert recipe.train.adversarial.num_steps == 7
    assert [attack.attack for attack in recipe.eval.robustness] == ["apgd", "corruptions"]
