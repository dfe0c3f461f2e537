"""The noise scale of a linear regression, whose gradients have a known covariance."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np

from pipeline.training.features.components.gradient_noise import GradientNoise
from pipeline.training.features.loss_scales import LossScaleState
from pipeline.training.state import Gradients, TrainState

DIMENSIONS, BATCH, PARTS = 5, 64, 4


def estimate(steps: int, scale: float) -> dict[str, tuple[float, float]]:
    """Averages after steps whose samples' gradients are normal around `MEAN`."""
    feature = GradientNoise(0.999, ("noise_scale/all", "noise_scale/dense"))
    parts = {"loss_scale": LossScaleState(jnp.float32(scale), None)}
    state = TrainState(jnp.int32(0), {}, {}, (), {**parts, feature.name: feature.init({})})
    rng = np.random.default_rng(0)
    total = np.zeros(2)
    for _ in range(steps):
        samples = MEAN + DEVIATION * rng.standard_normal((BATCH, DIMENSIONS))
        by_part = samples.reshape(PARTS, -1, DIMENSIONS).sum(1) / BATCH
        squares = {name: jnp.float32(scale**2 * (by_part**2).sum()) for name in ("all", "dense")}
        values: Any = {"dense": {"kernel": jnp.asarray(by_part.sum(0), jnp.float32)}}
        sums = {feature.name: (squares, jnp.float32(PARTS), jnp.float32(BATCH))}
        gradients = Gradients(values, jnp.float32(0), {}, sums)
        state = feature.change_update(state, state, gradients, BATCH)
        total += np.array(state.features[feature.name]["all"])
    return {
        name: (float(noise), float(signal))
        for name, (noise, signal) in state.features[feature.name].items()
    }


MEAN = np.array([0.5, -1.0, 0.25, 0.0, 2.0])
DEVIATION = np.array([1.0, 2.0, 0.5, 3.0, 0.1])


def test_ratio_is_the_trace_of_the_covariance_by_the_squared_gradient() -> None:
    expected = (DEVIATION**2).sum() / (MEAN**2).sum()
    for scale in (1.0, 128.0):
        averages = estimate(2000, scale)
        noise, signal = averages["dense"]
        np.testing.assert_allclose(noise / signal, expected, rtol=0.1)
        assert averages["all"] == averages["dense"]
