from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.robustness.corruptions import CORRUPTIONS, corrupt
from tests.slow_cases import mark_slow_except

SEED = jnp.array([7, 0], jnp.uint32)
PIXELS = jnp.asarray(np.random.default_rng(3).random((6, 16, 16, 3)), jnp.float32)
SAMPLE = jnp.arange(6)
LONG = ("noise", "pixelate", "rotate")
"""Corruptions whose operations take seconds to compile."""


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except(CORRUPTIONS.keys() - LONG, CORRUPTIONS))
def test_corruptions_grow_with_severity(name: str) -> None:
    # Smooth images, which blur and shifts change in proportion.
    grid = np.linspace(0, 3, 16)
    smooth = 0.4 + 0.2 * np.sin(grid[:, None] + grid + np.arange(6)[:, None, None])
    pixels = jnp.asarray(smooth[..., None], jnp.float32)
    changes = [
        float(jnp.square(corrupt(name, severity, pixels, SEED, SAMPLE) - pixels).mean())
        for severity in range(1, 6)
    ]
    # Some sizes of pixelate fit the images by chance.
    assert changes == sorted(changes) or name == "pixelate"
    assert 0 < changes[0] < changes[-1]


@pytest.mark.medium
@pytest.mark.parametrize("name", mark_slow_except(CORRUPTIONS.keys() - {"noise"}, CORRUPTIONS))
def test_corrupted_pixels_are_in_range_in_any_batch(name: str) -> None:
    corrupted = corrupt(name, 5, PIXELS, SEED, SAMPLE)
    assert corrupted.shape == PIXELS.shape
    assert corrupted.dtype == jnp.float32
    assert 0 <= float(corrupted.min()) <= float(corrupted.max()) <= 1
    part = corrupt(name, 5, PIXELS[2:5], SEED, SAMPLE[2:5])
    np.testing.assert_allclose(part, corrupted[2:5], atol=1e-6)


@pytest.mark.medium
def test_corruption_amounts_match_the_severity() -> None:
    grey = jnp.full((40, 16, 16, 1), 0.5)
    sample = jnp.arange(40)
    noise = corrupt("noise", 1, grey, SEED, sample) - grey
    assert float(noise.std()) == pytest.approx(0.08, rel=0.03)
    set_pixels = corrupt("salt and pepper", 5, grey, SEED, sample)
    assert float((set_pixels != 0.5).mean()) == pytest.approx(0.27, abs=0.015)
    assert float((set_pixels == 0).mean()) == pytest.approx(0.135, abs=0.01)
    brighter = corrupt("brightness", 2, grey, SEED, sample)
    np.testing.assert_allclose(brighter, 0.7, atol=1e-6)
