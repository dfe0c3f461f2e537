"""Laws of private steps, each of which a planted mistake breaks."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.registry import make_component
from pipeline.data.batch import Batch
from pipeline.training.privacy import private_gradients
from pipeline.training.privacy.privacy_spec import AdaptiveClip
from pipeline.training.privacy.private_gradients import PrivacyRule, get_privacy
from pipeline.training.state import TrainState
from pipeline.training.step import compute_step_gradients, make_train_step
from pipeline.training.step_config import StepConfig
from tests.models.build import network
from tests.training.test_step import BATCH, CLASSES, RATES, flat, make_batch, make_config, start

CLIP = 0.05
EXPECTED = 8
LAYERS = (
    make_component("layer", "conv", features=2, kernel=2),
    make_component("layer", "flatten"),
    make_component("layer", "dense", features=CLASSES),
)


def make_private(**changed: Any) -> StepConfig:
    rule = PrivacyRule(EXPECTED, CLIP, changed.pop("adaptive", None))
    return make_config(network=network(*LAYERS), privacy=rule, **changed)


def open_state(config: StepConfig, noise: float = 1.0) -> TrainState:
    state = start(make_train_step(config))
    part = get_privacy(state)
    assert np.isnan(part.noise)
    key = jnp.arange(4, dtype=jnp.uint32)
    return state.replace_part("privacy", replace(part, key=key, noise=jnp.float32(noise)))


def make_sum(config: StepConfig) -> Callable[[Batch], np.ndarray]:
    """Compile the sum of the gradients of a batch."""
    gradients = jax.jit(lambda state, batch: compute_step_gradients(config, state, batch).values)
    state = open_state(config)
    return lambda batch: flat(gradients(state, batch))


@pytest.fixture(scope="module")
def sum_batch() -> Callable[[Batch], np.ndarray]:
    return make_sum(make_private())


@pytest.mark.medium
@pytest.mark.parametrize("left_out", range(BATCH))
def test_sample_changes_the_sum_by_at_most_the_clip(
    left_out: int, sum_batch: Callable[[Batch], np.ndarray]
) -> None:
    """Planted mistakes: clipping after the mean, and samples that depend on each other."""
    batch = make_batch()
    order = [*(n for n in range(BATCH) if n != left_out), left_out]
    columns = {name: column[order] for name, column in batch.columns.items()}
    whole = sum_batch(replace(batch, columns=columns))
    part = sum_batch(replace(batch, columns=columns, count=np.int32(BATCH - 1)))
    change = np.linalg.norm(whole - part)
    # Gradients are longer than the clip here, so that a sample has all of it.
    assert change == pytest.approx(CLIP, rel=1e-4)


@pytest.mark.medium
def test_microbatches_clip_samples_instead_of_their_sums() -> None:
    """Planted mistake: accumulation that clips each microbatch."""
    batch = make_batch(samples=8)
    whole = make_sum(make_private())(batch)
    for accumulate in (2, 8):
        parts = make_sum(make_private(accumulate=accumulate))(batch)
        np.testing.assert_allclose(parts, whole, rtol=1e-4, atol=1e-7)


@pytest.mark.medium
def test_divisor_is_the_expected_batch_size(monkeypatch: pytest.MonkeyPatch) -> None:
    """Planted mistake: dividing by the drawn batch."""
    monkeypatch.setattr(
        private_gradients, "draw_normals", lambda key, step, number, size: jnp.zeros(size)
    )
    config = make_private(optimizer=make_plain_optimizer())
    step = jax.jit(make_train_step(config).step)
    sum_batch = make_sum(config)
    state = open_state(config)
    for count in (1, 3):
        batch = replace(make_batch(), count=np.int32(count))
        after, record = step(state, batch, RATES)
        moved = flat(state.params) - flat(after.params)
        expected = RATES[0] * sum_batch(batch) / EXPECTED
        np.testing.assert_allclose(moved, expected, atol=1e-7)
        assert np.isfinite(record.loss)


def make_plain_optimizer() -> Any:
    import optax

    return optax.identity()


@pytest.mark.medium
def test_step_without_samples_is_only_noise() -> None:
    config = make_private(optimizer=make_plain_optimizer())
    step = jax.jit(make_train_step(config).step)
    state = open_state(config, noise=2.0)
    batch = replace(make_batch(), count=np.int32(0))
    after, record = step(state, batch, RATES)
    assert record.loss == 0
    noise = (flat(state.params) - flat(after.params)) * EXPECTED / (RATES[0] * CLIP * 2.0)
    assert 0.5 < noise.std() < 1.5
    # Another step has other noise, and the same step the same.
    later = replace(state, step=state.step + 1)
    again, _ = step(state, batch, RATES)
    np.testing.assert_array_equal(flat(again.params), flat(after.params))
    other, _ = step(later, batch, RATES)
    assert (flat(other.params) != flat(after.params)).mean() > 0.9


@pytest.mark.medium
def test_hostile_sample_does_not_stop_the_run() -> None:
    """Planted mistake: a gradient that isn't finite left unclipped."""
    config = make_private(train_ops=())
    batch = make_batch()
    image = batch.columns["image"].astype(np.float32)
    image[1] = np.inf
    batch = replace(batch, columns={**batch.columns, "image": image})
    after, record = jax.jit(make_train_step(config).step)(open_state(config), batch, RATES)
    assert np.isfinite(record.loss)
    assert np.isfinite(flat(after.params)).all()
    assert int(after.step) == 1


@pytest.mark.medium
def test_clip_follows_the_norms() -> None:
    config = make_private(adaptive=AdaptiveClip(quantile=0.5, rate=0.2))
    step = jax.jit(make_train_step(config).step)
    state = open_state(config, noise=0.5)
    for number in range(30):
        state, _ = step(state, make_batch(number, samples=8), np.zeros(1, np.float32))
    # It began far below all norms.
    assert get_privacy(state).clip > 3 * CLIP
