"""Settings of observers from a recipe."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.recipe import Recipe


@pytest.mark.medium
def test_observer_settings_match_the_recipe(tiny: Callable[..., Recipe]) -> None:
    settings = make_observer_settings(tiny("train.batch_size=8", "monitor.loss_every=7"))
    assert (settings.batch_size, settings.loss_every) == (8, 7)
    assert settings.trains
    assert not settings.skips_overflow
    assert settings.board is None


@pytest.mark.medium
def test_tensorboard_settings_have_the_complete_recipe(tiny: Callable[..., Recipe]) -> None:
    recipe = tiny("monitor.tensorboard=true", "train.loss_scale=dynamic", "stages=[data,build]")
    settings = make_observer_settings(recipe)
    assert settings.board == recipe.model_dump(mode="json")
    assert settings.skips_overflow
    assert not settings.trains
