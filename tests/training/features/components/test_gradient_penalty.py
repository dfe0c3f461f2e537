"""The penalty on input gradients against finite differences."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.features.components.gradient_penalty import GradientPenalty
from pipeline.training.losses import compute_losses
from pipeline.training.step import map_batch
from tests.training.test_step import RATES, make_batch, make_config, make_step, start


@pytest.mark.slow
def test_loss_has_half_the_weighted_squares_of_the_input_gradients() -> None:
    weight, width = 0.3, 1e-2
    config = make_config()
    penalized = make_step(features=(*config.features, GradientPenalty(weight)))
    state, batch = start(penalized), make_batch()
    _, record = penalized.step(state, batch, RATES)
    _, plain = make_step().step(start(make_step()), batch, RATES)
    images, labels = map_batch(config, config.train_ops, batch)

    def losses(images: jax.Array) -> np.ndarray:
        logits = config.network.apply(state.variables, images, train=True, mutable=[])[0]
        return np.asarray(compute_losses(config, logits, labels), np.float64)

    squares = np.zeros(len(images))
    for index in np.ndindex(images.shape[1:]):
        shift = jnp.zeros_like(images).at[(slice(None), *index)].set(width)
        squares += ((losses(images + shift) - losses(images - shift)) / (2 * width)) ** 2
    expected = float(plain.loss) + weight / 2 * squares.mean()
    assert float(record.loss) == pytest.approx(expected, rel=1e-3)
    assert float(record.loss) > float(plain.loss)
