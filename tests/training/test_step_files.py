"""The modules of training that an ordinary step goes through, noted while it is traced."""

from __future__ import annotations

import sys
from pathlib import Path
from types import FrameType
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import pipeline.training
from pipeline import load_recipe
from pipeline.data.batch import Batch
from pipeline.data.columns import Targets
from pipeline.data.random import seed_words
from pipeline.stages.build import make_step_config
from pipeline.training.step import make_train_step
from tests.training.step_configs import read_image

BATCH = 4
FOLDER = Path(pipeline.training.__file__).parent


@pytest.mark.slow
def test_plain_step_uses_few_files() -> None:
    recipe = load_recipe("lenet5_mnist", ["optimizer=sgd"])
    config = make_step_config(recipe, Targets(tuple("0123456789")), read_image((32, 32, 1)), (), ())
    step = make_train_step(config)
    batch = Batch(
        columns={
            "image": np.zeros((BATCH, 32, 32, 1), np.float32),
            "label": np.zeros(BATCH, np.int32),
        },
        seed=seed_words(7),
        epoch=jnp.int32(0),
        sample=jnp.arange(BATCH),
        count=jnp.int32(BATCH),
    )
    state = jax.eval_shape(step.init, seed_words(7))
    files: set[str] = set()

    def note(frame: FrameType, event: str, argument: Any) -> None:
        file = Path(frame.f_code.co_filename)
        if event == "call" and file.is_relative_to(FOLDER):
            files.add(str(file.relative_to(FOLDER)))

    sys.setprofile(note)
    try:
        jax.eval_shape(step.step, state, batch, np.zeros(1, np.float32))
    finally:
        sys.setprofile(None)
    assert files == {
        "step.py",
        "forward_pass.py",
        "losses.py",
        "update.py",
        "state.py",
        "step_config.py",
        "bucketing.py",
        "step_feature.py",
        "features/loss_scales.py",
        "telemetry.py",
        "optimizers/first_order.py",
    }
