"""Gradients that are accumulated take the memory of one microbatch, whatever their number."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline import load_recipe
from pipeline.data.batch import Batch
from pipeline.data.columns import Targets
from pipeline.data.random import seed_words
from pipeline.stages.build import make_step_config
from pipeline.training.step import make_train_step
from tests.training.step_configs import read_image

MICROBATCH, FEATURES, HIDDEN = 128, 64, 512
FIXED = ["model=mlp", f"model.hidden=[{HIDDEN}]", "dataset.train.ops=[]", "dataset.eval.ops=[]"]


def temporaries(microbatches: int) -> tuple[int, int]:
    """Bytes of the temporaries of a compiled step, and of the gradients."""
    batch = MICROBATCH * microbatches
    length = [f"train.batch_size={batch}", f"train.accumulate_steps={microbatches}"]
    recipe = load_recipe("lenet5_digits", [*FIXED, *length])
    image = read_image((8, 8, 1))
    step = make_train_step(make_step_config(recipe, Targets(tuple("0123456789")), image, (), ()))
    given = Batch(
        columns={
            "image": np.zeros((batch, 8, 8, 1), np.float32),
            "label": np.zeros(batch, np.int32),
        },
        seed=seed_words(7),
        epoch=jnp.int32(0),
        sample=jnp.arange(batch),
        count=jnp.int32(batch),
    )
    state = jax.eval_shape(step.init, seed_words(7))
    program = jax.jit(step.step, donate_argnums=0).lower(state, given, np.zeros(1, np.float32))
    analysis = program.compile().memory_analysis()
    assert analysis is not None
    gradients = sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(state.params))
    return analysis.temp_size_in_bytes, gradients


@pytest.mark.slow
def test_eight_microbatches_take_the_memory_of_one_and_gradients() -> None:
    """Beside the mapped batch, which the microbatches are sliced from."""
    alone, gradients = temporaries(1)
    mapped = 4 * 8 * MICROBATCH * FEATURES
    eight, _ = temporaries(8)
    assert eight <= 1.05 * (alone + gradients + mapped)
    assert eight < 0.3 * 8 * alone
