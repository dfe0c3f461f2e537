"""Distillation against a formula in numpy.

The penalty on input gradients against finite differences.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.registry import make_component
from pipeline.training.features.components.loss_terms import Distillation, GradientPenalty
from pipeline.training.forward_pass import Outputs
from pipeline.training.losses import compute_losses
from pipeline.training.state import MappedBatch
from pipeline.training.step import map_batch
from pipeline.training.step_feature import TrainedNetwork
from tests.training.test_step import RATES, flat, make_batch, make_config, make_step, start


def log_softmax(logits: Any) -> np.ndarray:
    values = np.asarray(logits, np.float64)
    return values - np.log(np.exp(values).sum(-1, keepdims=True))


@pytest.mark.slow
def test_loss_is_the_weighted_mean_of_both_losses() -> None:
    config = make_config()
    network = config.network
    other = make_step().init(np.array([5, 6], np.uint32))
    teacher = TrainedNetwork(
        lambda variables, images: network.apply(variables, images, train=False), other.variables
    )
    spec = make_component("feature", "distill", teacher="run", weight=0.3, temperature=2.0)
    step = make_step(features=(*config.features, Distillation(spec, teacher)))
    state, batch = start(step), make_batch(count=np.int32(3))
    _, record = step.step(state, batch, RATES)
    _, plain = make_step().step(start(make_step()), batch, RATES)
    images, _ = map_batch(config, config.train_ops, batch)
    log_p, log_q = (
        log_softmax(network.apply(variables, images, train=False)[:3] / 2.0)
        for variables in (other.variables, state.variables)
    )
    divergence = (np.exp(log_p) * (log_p - log_q)).sum(-1).mean()
    assert float(record.extras[0]) == pytest.approx(divergence, rel=1e-4)
    expected = 0.7 * float(plain.loss) + 0.3 * 4 * divergence
    assert float(record.loss) == pytest.approx(expected, rel=1e-5)


def test_positions_without_a_label_have_no_divergence() -> None:
    """Two positions, of which the first sample has a label at one, and the second at none."""
    config = make_config(ignore_index=-1)
    logits = jnp.arange(12, dtype=jnp.float32).reshape(2, 2, 3) % 5
    labels = jnp.array([[1, -1], [-1, -1]])
    teacher = TrainedNetwork(lambda variables, inputs: inputs, {})
    spec = make_component("feature", "distill", teacher="run", weight=1.0, temperature=1.0)

    def find_losses(teacher_logits: Any) -> Any:
        batch = MappedBatch(teacher_logits, labels, jnp.ones(2, bool), jnp.zeros(2))
        state = SimpleNamespace(features={"distill": {}})
        forward: Any = SimpleNamespace(config=config, state=state, batch=batch)
        outputs = Outputs(logits, jnp.zeros(2), {}, {})
        return Distillation(spec, teacher).change_outputs(forward, {}, outputs).losses

    others = jnp.zeros((2, 2, 3)).at[0, 0].set(jnp.array([1.0, 0.0, 2.0]))
    log_p, log_q = log_softmax(others[0, 0]), log_softmax(logits[0, 0])
    expected = [(np.exp(log_p) * (log_p - log_q)).sum(), 0.0]
    np.testing.assert_allclose(find_losses(others), expected, rtol=1e-5)
    np.testing.assert_array_equal(find_losses(others.at[0, 1].set(9.0)), find_losses(others))


@pytest.mark.slow
def test_average_as_teacher_follows_the_network() -> None:
    spec = make_component("feature", "distill", teacher="ema", decay=0.75)
    step = make_step(features=(*make_config().features, Distillation(spec, None)))
    state = start(step)
    average = flat(state.params)
    for number in range(3):
        state, record = step.step(state, make_batch(number), RATES)
        average = average + 0.25 * (flat(state.params) - average)
        np.testing.assert_allclose(flat(state.features["distill"]), average, rtol=1e-5, atol=1e-7)
    assert float(record.extras[0]) > 0


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
