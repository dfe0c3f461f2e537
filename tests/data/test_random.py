"""Counter-based randomness: published vectors, jax's own cipher as oracle, and independence."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.extend.random import threefry_2x32 as jax_threefry_2x32

from pipeline.data.random import MAX_SEED, encrypt_threefry, scale_to_integers, seed_words, uniforms

# counter, key, result: the lines "threefry2x32 20" of Random123's kat_vectors
KNOWN_ANSWERS = [
    ((0x00000000, 0x00000000), (0x00000000, 0x00000000), (0x6B200159, 0x99BA4EFE)),
    ((0xFFFFFFFF, 0xFFFFFFFF), (0xFFFFFFFF, 0xFFFFFFFF), (0x1CB996FC, 0xBB002BE7)),
    ((0x243F6A88, 0x85A308D3), (0x13198A2E, 0x03707344), (0xC4923A9C, 0x483DF7A0)),
]
SAMPLES = np.arange(1000, dtype=np.int32)


def pair(xp, words):
    return tuple(xp.asarray([word], np.uint32) for word in words)


@pytest.mark.slow
@pytest.mark.parametrize("xp", [np, jnp])
@pytest.mark.parametrize(("counter", "key", "expected"), KNOWN_ANSWERS)
def test_threefry_returns_the_published_values(xp, counter, key, expected):
    result = encrypt_threefry(pair(xp, key), pair(xp, counter))
    assert tuple(int(word[0]) for word in result) == expected


@pytest.mark.slow
def test_threefry_agrees_with_jax():
    words = np.random.default_rng(0).integers(0, 2**32, (2, 500), dtype=np.uint32)
    key = np.array([0xDEADBEEF, 7], np.uint32)
    result = encrypt_threefry((key[:1], key[1:]), (words[0], words[1]))
    expected = jax_threefry_2x32(key, words.ravel())
    np.testing.assert_array_equal(np.concatenate(result), expected)


@pytest.mark.slow
def test_uniforms_are_identical_on_host_and_device():
    epochs = np.arange(1000, dtype=np.int32) % 7
    device = jax.jit(lambda *keys: uniforms(jnp, *keys, op=3, draws=5))
    for seed in (0, MAX_SEED):
        words = seed_words(seed)
        expected = uniforms(np, words, epochs, SAMPLES, op=3, draws=5)
        assert expected.shape == (1000, 5)
        assert expected.dtype == np.float32
        np.testing.assert_array_equal(device(words, epochs, SAMPLES), expected)


@pytest.mark.parametrize("xp", [np, jnp])
def test_uniforms_of_zero_draws_are_empty(xp):
    assert uniforms(xp, seed_words(1), 0, SAMPLES, op=0, draws=0).shape == (1000, 0)


def test_scalar_epoch_applies_to_every_sample():
    words = seed_words(5)
    np.testing.assert_array_equal(
        uniforms(np, words, 4, SAMPLES, op=1, draws=2),
        uniforms(np, words, np.full(1000, 4), SAMPLES, op=1, draws=2),
    )


def test_draw_is_independent_of_batch_and_later_draws():
    words = seed_words(5)
    whole = uniforms(np, words, 4, SAMPLES, op=1, draws=5)
    shuffled = SAMPLES[::-1][100:200]
    for draws in range(1, 6):
        part = uniforms(np, words, 4, shuffled, op=1, draws=draws)
        np.testing.assert_array_equal(part, whole[shuffled, :draws])


def test_draws_differ_for_every_combination_of_coordinates():
    coordinates = [
        (seed, epoch, op) for seed in (0, 1, 2**32, 2**33) for epoch in range(3) for op in range(3)
    ]
    drawn = [
        uniforms(np, seed_words(seed), epoch, SAMPLES[:8], op, draws=4).tobytes()
        for seed, epoch, op in coordinates
    ]
    assert len(set(drawn)) == len(coordinates)
    assert np.unique(uniforms(np, seed_words(0), 0, SAMPLES[:50], 0, draws=4)).size == 200


@pytest.mark.slow
@pytest.mark.parametrize("axis", ["epoch", "sample", "op", "draw"])
def test_uniforms_are_uniform_along_every_coordinate(axis):
    words, count = seed_words(11), 4096
    if axis == "epoch":
        drawn = uniforms(np, words, np.arange(count), np.zeros(count, int), 0, draws=1)
    elif axis == "sample":
        drawn = uniforms(np, words, 0, np.arange(count), 0, draws=1)
    elif axis == "op":
        drawn = np.array([uniforms(np, words, 0, np.zeros(1, int), op, 1) for op in range(count)])
    else:
        drawn = uniforms(np, words, 0, np.zeros(1, int), 0, draws=count)
    drawn = drawn.ravel()
    assert drawn.min() >= 0
    assert drawn.max() < 1
    buckets = np.bincount((drawn * 16).astype(int), minlength=16)
    chi_square = ((buckets - count / 16) ** 2 / (count / 16)).sum()
    assert chi_square < 37.7  # 0.1 % of true uniforms exceed this at 15 degrees of freedom
    assert abs(np.corrcoef(drawn[1:], drawn[:-1])[0, 1]) < 0.05


def test_uniforms_are_multiples_of_2_to_the_minus_24():
    drawn = uniforms(np, seed_words(3), 0, SAMPLES, 0, draws=4)
    scaled = drawn.astype(np.float64) * 2**24
    np.testing.assert_array_equal(scaled, np.rint(scaled))
    assert (scaled % 2).any()


@given(bound=st.integers(1, 2**24))
def test_integers_reach_zero_and_stay_below_the_bound(bound):
    ends = np.array([0, (2**24 - 1) / 2**24], np.float32)
    np.testing.assert_array_equal(scale_to_integers(np, ends, bound), [0, bound - 1])


@pytest.mark.parametrize(
    ("seed", "words"),
    [(0, [0, 0]), (7, [7, 0]), (2**32 + 5, [5, 1]), (MAX_SEED, [2**32 - 1, 2**31 - 1])],
)
def test_seed_words_are_low_then_high(seed, words):
    np.testing.assert_array_equal(seed_words(seed), np.array(words, np.uint32))


@pytest.mark.parametrize("seed", [-1, 2**63])
def test_seed_out_of_range_is_refused(seed):
    with pytest.raises(
        ValueError, match=f"seed = {seed}: must be a whole number from 0 to 9223372036854775807"
    ):
        seed_words(seed)
