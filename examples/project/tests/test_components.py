"""Tests of the components of this project, and of its recipe."""

from __future__ import annotations

from pathlib import Path

import components
import numpy as np

from pipeline import Trainer


def test_darkened_images_are_no_brighter() -> None:
    images = np.ones((2, 4, 4, 1), np.float32)
    uniforms = np.array([[0.0], [1.0]], np.float32)
    darkened = components.Darken(most=0.25)(np, images, uniforms)
    assert darkened[0].max() == 1.0
    assert darkened[1].max() == 0.75


def test_the_recipe_learns(tmp_path: Path) -> None:
    recipe = Path(__file__).parents[1] / "recipes" / "demo.yaml"
    trainer = Trainer(str(recipe), ["monitor.tensorboard=false"], run_dir=tmp_path / "run")
    trainer.fit()
    scores = trainer.evaluate()
    assert scores["accuracy"] > 0.5
    assert scores["weight_norm"] > 0
