"""The noise scale of a linear regression, whose gradients have a known covariance.

Labels per second and utilisation from steps of a known time.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.features.components.measurements import (
    GradientNoise,
    Throughput,
    measure_peak,
)
from pipeline.training.features.loss_scales import LossScaleState
from pipeline.training.parallel.parallel_spec import Shards
from pipeline.training.state import Gradients, TrainState
from pipeline.training.telemetry import Telemetry
from tests.training.test_step import RATES, make_batch, make_config, make_step, start

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


def test_parts_have_the_factor_of_added_gradients_of_devices() -> None:
    """Without `mirror_mean` the sum over shards is multiplied by the number of devices."""
    feature = GradientNoise(0.9, ("noise_scale/all", "noise_scale/dense"))
    values = {"dense": {"kernel": jnp.array([1.0, 2.0])}}
    batch = SimpleNamespace(mask=jnp.ones(4, bool))
    squares = []
    for shards in (None, Shards(2), Shards(2, factor=2)):
        forward: Any = SimpleNamespace(batch=batch, config=SimpleNamespace(shards=shards))
        squares.append(float(feature.sum_part(forward, values)[0]["all"]))
    assert squares == [5.0, 5.0, 20.0]


def test_rates_are_of_all_steps_of_a_dispatch() -> None:
    telemetry = Telemetry(0, {"labels": np.array([32.0, 16.0], np.float32)})
    measured = Throughput(3e9, 1.5).measure(telemetry, 0.5)
    assert measured["labels_per_s"].tolist() == [96.0, 96.0]
    assert measured["model_flops_utilisation"] == pytest.approx([0.008, 0.008])


@pytest.mark.slow
def test_step_counts_its_valid_labels() -> None:
    step = make_step(features=(*make_config().features, Throughput(1.0, 1.0)))
    _, record = step.step(start(step), make_batch(count=np.int32(3)), RATES)
    assert record.extras == (3.0,)
    assert step.columns[-1] == "labels"


@pytest.mark.slow
def test_peak_is_that_of_a_processor() -> None:
    assert 1e9 < measure_peak() < 1e16
