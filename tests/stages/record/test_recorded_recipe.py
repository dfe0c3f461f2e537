from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import yaml

from pipeline.config.recipe import Recipe
from tests.stages.record.test_run_directory import leave

Compose = Callable[..., Recipe]


@pytest.mark.slow
def test_recorded_recipe_is_resolved(tiny: Compose, tmp_path: Path) -> None:
    recipe = tiny("train.steps=7")
    leave(tmp_path / "run", recipe)
    kept = yaml.safe_load((tmp_path / "run" / "recipe.yaml").read_text())
    assert kept == recipe.model_dump(mode="json")
