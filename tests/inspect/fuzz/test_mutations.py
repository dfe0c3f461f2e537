"""Changes of images stay within their limits, whatever is drawn."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.random import seed_words
from pipeline.inspect.fuzz.mutations import KINDS, ChangeLimits, _blur, mutate


@pytest.mark.medium
@pytest.mark.parametrize(
    ("radius", "white", "channels"),
    [
        pytest.param(0.0, 255, 1, marks=pytest.mark.slow),
        pytest.param(0.3, 16, 1, marks=pytest.mark.slow),
        (0.11, 255, 3),
    ],
)
def test_changes_are_within_the_limits(radius: float, white: int, channels: int) -> None:
    seed = 5
    generator = np.random.default_rng(seed)
    images = generator.integers(0, white + 1, (40, 8, 8, channels), dtype=np.uint8)
    is_affine = generator.random(40) < 0.5
    words = seed_words(seed)
    change = jax.jit(partial(mutate, ChangeLimits(radius, white)))
    changed, references, kinds = map(
        np.asarray, change(images, images, is_affine, words, np.int32(3))
    )
    distance = np.abs(changed.astype(int) - references.astype(int))
    assert distance.max() <= radius * white + 1e-6
    assert changed.max() <= white
    assert not (is_affine & (kinds == 0)).any()
    assert np.array_equal(references[kinds != 0], images[kinds != 0])
    again = change(images, images, is_affine, words, np.int32(3))
    assert np.array_equal(changed, np.asarray(again[0]))


@pytest.mark.medium
def test_every_change_is_drawn_and_changes() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(50, 150, (256, 8, 8, 1), dtype=np.uint8)
    nothing = np.zeros(256, bool)
    change = jax.jit(partial(mutate, ChangeLimits(0.3, 255)))
    changed, _, kinds = map(np.asarray, change(images, images, nothing, seed_words(1), np.int32(0)))
    assert set(kinds.tolist()) == set(range(len(KINDS)))
    is_changed = (changed != images).any(axis=(1, 2, 3))
    for kind in range(len(KINDS)):
        assert is_changed[kinds == kind].mean() > 0.8


@pytest.mark.medium
def test_blur_is_a_binomial_average() -> None:
    image = np.random.default_rng(2).integers(0, 256, (1, 5, 7, 1), dtype=np.uint8)
    padded = np.pad(image[0, :, :, 0].astype(int), 1, mode="edge")
    weights = np.outer([1, 2, 1], [1, 2, 1])
    for row in range(5):
        for column in range(7):
            mean = (padded[row : row + 3, column : column + 3] * weights).sum() / 16
            assert int(_blur(jnp.asarray(image))[0, row, column, 0]) == pytest.approx(mean, abs=0.5)
