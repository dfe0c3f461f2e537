from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pipeline.training.privacy.add_noise import (
    PrivacyRule,
    PrivacyState,
    adapt_clip,
    add_noise,
    draw_normals,
    round_up_to_float32,
    split_noise,
)
from pipeline.training.privacy.privacy_spec import AdaptiveClip

KEY = jnp.array([1, 2, 3, 4], jnp.uint32)
draw = jax.jit(draw_normals, static_argnums=(2, 3))


@pytest.mark.medium
def test_draws_are_standard_normal() -> None:
    values = np.asarray(draw(KEY, 5, 1, 200_000), np.float64)
    assert stats.kstest(values, "norm").pvalue > 1e-3
    assert np.abs(values).max() > 4
    neighbours = np.corrcoef(values[:-1], values[1:])[0, 1]
    assert abs(neighbours) < 0.01


@pytest.mark.medium
def test_draws_differ_by_step_parameter_and_key() -> None:
    """Noise differs for each step and parameter, and doesn't depend on the number of draws."""
    first = np.asarray(draw(KEY, 5, 1, 64))
    for key, step, number in ((KEY, 6, 1), (KEY, 5, 2), (KEY + jnp.uint32(1), 5, 1)):
        assert (np.asarray(draw(key, step, number, 64)) != first).all()
    np.testing.assert_array_equal(draw(KEY, 5, 1, 16), first[:16])
    # The words of the order of samples don't decide noise.
    np.testing.assert_array_equal(draw(KEY.at[2:].set(9), 5, 1, 64), first)


@pytest.mark.medium
def test_noise_has_the_deviation_of_the_rule() -> None:
    """Planted mistake: noise off."""
    rule = PrivacyRule(expected_batch_size=10, clip=0.5)
    privacy = PrivacyState(KEY, jnp.float32(2.0), jnp.float32(0.5))
    sums = {"a": jnp.full((40_000,), 3.0), "b": jnp.zeros((200, 200))}
    noisy = jax.jit(lambda: add_noise(rule, privacy, jnp.int32(3), sums))()
    assert float(noisy["a"].mean()) == pytest.approx(0.3, abs=3e-3)
    for leaf in noisy.values():
        assert float(leaf.std()) == pytest.approx(2.0 * 0.5 / 10, rel=0.02)
    assert abs(np.corrcoef(noisy["a"], noisy["b"].ravel())[0, 1]) < 0.02


@pytest.mark.medium
def test_clip_adapts_to_the_share_within_it() -> None:
    rule = PrivacyRule(1_000_000, 1.0, AdaptiveClip(quantile=0.5, rate=0.2))
    privacy = PrivacyState(KEY, jnp.float32(1.0), jnp.float32(1.0))
    for within, sign in ((900_000, -1), (100_000, 1)):
        after = adapt_clip(rule, privacy, jnp.int32(0), jnp.float32(within), jnp.int32(1_000_000))
        noise = 0.05 * float(draw(KEY, 0, 0, 1)[0])
        assert float(jnp.log(after.clip)) == pytest.approx(0.2 * (0.4 * sign - noise), rel=1e-3)
    fixed = PrivacyRule(10, 1.0)
    assert adapt_clip(fixed, privacy, jnp.int32(0), jnp.float32(1), jnp.int32(2)) is privacy


def test_noise_increases_to_pay_for_the_noisy_count() -> None:
    noise = split_noise(1.1, 50.0)
    assert noise > 1.1
    assert noise**-2 + (2 * 50.0) ** -2 == pytest.approx(1.1**-2)
    with pytest.raises(ValueError, match=r"noise = 3: must be below 2 with an adaptive clip"):
        split_noise(3.0, 1.0)


@pytest.mark.parametrize("noise", [0.1, 1.0, 1 / 3, 7.7])
def test_noise_is_rounded_up(noise: float) -> None:
    rounded = round_up_to_float32(noise)
    assert np.float32(rounded) == rounded
    assert noise <= rounded < noise * (1 + 1e-6)
