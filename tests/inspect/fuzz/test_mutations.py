"""Changes of images stay within their limits, whatever is drawn."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.random import seed_words
from pipeline.inspect.fuzz.mutations import KINDS, Ball, _blur, mutate


@settings(max_examples=20)
@given(st.floats(0, 1), st.sampled_from([16, 255]), st.integers(0, 2**30), st.sampled_from([1, 3]))
def test_changes_stay_within_the_ball(radius: float, white: int, seed: int, channels: int) -> None:
    generator = np.random.default_rng(seed)
    images = generator.integers(0, white + 1, (40, 8, 8, channels), dtype=np.uint8)
    is_affine = generator.random(40) < 0.5
    words = seed_words(seed)
    ball = Ball(radius, white)
    changed, references, kinds = map(
        np.asarray, mutate(ball, images, images, is_affine, words, np.int32(3))
    )
    distance = np.abs(changed.astype(int) - references.astype(int))
    assert distance.max() <= radius * white + 1e-6
    assert changed.max() <= white
    assert not (is_affine & (kinds == 0)).any()
    assert np.array_equal(references[kinds != 0], images[kinds != 0])
    again = mutate(ball, images, images, is_affine, words, np.int32(3))
    assert np.array_equal(changed, np.asarray(again[0]))


def test_every_change_is_drawn_and_changes() -> None:
    generator = np.random.default_rng(0)
    images = generator.integers(50, 150, (256, 8, 8, 1), dtype=np.uint8)
    nothing = np.zeros(256, bool)
    changed, _, kinds = map(
        np.asarray, mutate(Ball(0.3, 255), images, images, nothing, seed_words(1), np.int32(0))
    )
    assert set(kinds.tolist()) == set(range(len(KINDS)))
    is_changed = (changed != images).any(axis=(1, 2, 3))
    for kind in range(len(KINDS)):
        assert is_changed[kinds == kind].mean() > 0.8


def test_blur_is_a_binomial_average() -> None:
    image = np.random.default_rng(2).integers(0, 256, (1, 5, 7, 1), dtype=np.uint8)
    padded = np.pad(image[0, :, :, 0].astype(int), 1, mode="edge")
    weights = np.outer([1, 2, 1], [1, 2, 1])
    for row in range(5):
        for column in range(7):
            mean = (padded[row : row + 3, column : column + 3] * weights).sum() / 16
            assert int(_blur(image)[0, row, column, 0]) == pytest.approx(mean, abs=0.5)
