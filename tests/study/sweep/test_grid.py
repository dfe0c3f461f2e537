from __future__ import annotations

import sys
from typing import Any

import pytest
from hydra import compose, initialize_config_dir
from hydra.utils import instantiate
from omegaconf import OmegaConf

from pipeline.core.errors import RecipeError
from pipeline.core.files.paths import CONF
from pipeline.study.sweep.grid import read_settings

DEFAULTS = {"other": ["train.steps=3"], "metric": None, "pairs": 16, "minutes": None}


@pytest.mark.parametrize(
    ("settings", "rule"),
    [
        ({"other": []}, "hydra.sweeper.other = []: must have all overrides of side B"),
        ({"other": ["train.steps=3,4"]}, "train.steps: has several values on side B"),
        ({"metric": "acuracy"}, "hydra.sweeper.metric = acuracy"),
        ({"pairs": 5}, "hydra.sweeper.pairs = 5: must be a whole number from 6, the fewest"),
        ({"pairs": 10**9}, "to 1,000"),
        ({"pairs": 6.5}, "hydra.sweeper.pairs = 6.5"),
        ({"minutes": 0}, "hydra.sweeper.minutes = 0: must be a number above 0"),
        ({"minutes": "soon"}, "hydra.sweeper.minutes = soon"),
    ],
)
def test_invalid_settings_are_refused(settings: dict[str, Any], rule: str) -> None:
    with pytest.raises(RecipeError) as error:
        read_settings({**DEFAULTS, **settings})
    assert rule in str(error.value)


def test_settings_are_read() -> None:
    settings = read_settings({**DEFAULTS, "minutes": 2, "metric": "loss"})
    assert settings.other == ("train.steps=3",)
    assert (settings.metric, settings.pairs, settings.minutes) == ("loss", 16, 2)


def test_grid_is_made_without_optuna(monkeypatch: pytest.MonkeyPatch) -> None:
    """As Hydra makes it, with the pruner that `hydra/sweeper=grid` names."""
    monkeypatch.setitem(sys.modules, "optuna", None)
    with initialize_config_dir(str(CONF), version_base="1.3"):
        config = compose("config", return_hydra_config=True)
    sweeper = OmegaConf.to_container(config.hydra.sweeper)
    assert sweeper["pruner"]["_target_"].startswith("optuna.")
    # Hydra imports plug-ins anew, so the class is another object.
    assert type(instantiate(sweeper)).__name__ == "GridSweeper"
