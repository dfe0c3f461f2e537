"""What a recipe with privacy may not ask for; all problems in one message."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config.recipe import Recipe
from pipeline.core.errors import RecipeError

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
