"""The permutation that needs no list: every number once, at any place equally often."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.data.order import permute

SEEDS = st.integers(0, 2**63 - 1)


@pytest.mark.medium
@settings(deadline=None)
@given(size=st.integers(1, 3000), seed=SEEDS, number=st.integers(0, 2**63 - 1))
def test_permutation_has_every_number_once(size: int, seed: int, number: int) -> None:
    assert sorted(permute(np.arange(size), size, seed, number)) == list(range(size))


@settings(deadline=None)
@given(size=st.integers(1, 2**32), seed=SEEDS, place=st.integers(0, 2**32 - 1))
def test_position_does_not_depend_on_queried_neighbours(size: int, seed: int, place: int) -> None:
    places = np.array([place % size, 0, size - 1])
    together = permute(places, size, seed, 3)
    assert ((together >= 0) & (together < size)).all()
    assert together[0] == permute(places[:1], size, seed, 3)[0]


@pytest.mark.parametrize("size", [4096, 4000])
def test_differences_are_not_preserved(size: int) -> None:
    """Numbers that differ by 1, or by one in their high digit, are as far apart as by chance: each
    distance is counted in 200 permutations, about once in each."""
    draws, digit = 200, 64
    permutations = [permute(np.arange(size), size, 5, number) for number in range(draws)]
    for step in (1, digit):
        distances = np.concatenate([p[step:] - p[:-step] for p in permutations])
        for distance in (1, -1, digit, -digit):
            found = int((distances == distance).sum())
            expected = len(distances) * (size - abs(distance)) / (size * (size - 1))
            assert abs(found - expected) < 5 * np.sqrt(expected), (step, distance)


@pytest.mark.medium
@pytest.mark.parametrize("size", [2**20 + 1, 3 * 2**19, 2**21 - 1, 2**21 + 1, 10**7])
def test_numbers_one_high_digit_apart_are_as_close_as_by_chance(size: int) -> None:
    digit = -(-size // math.ceil(math.sqrt(size)))
    keys, n = 40, 50_000
    permutations = [permute(np.arange(n + digit), size, 3, number) for number in range(keys)]
    close = sum(int((np.abs(p[digit:] - p[:-digit]) < digit).sum()) for p in permutations)
    expected = keys * n * 2 * digit / size
    assert abs(close - expected) < 4 * np.sqrt(expected)


@pytest.mark.slow
@pytest.mark.parametrize("size", [64, 100])
def test_permutation_places_are_uniform(size: int) -> None:
    draws = 6000
    counts = np.zeros((size, size))
    for number in range(draws):
        counts[np.arange(size), permute(np.arange(size), size, 7, number)] += 1
    expected = draws / size
    chi_square = ((counts - expected) ** 2 / expected).sum()
    freedom = (size - 1) ** 2
    assert abs(chi_square - freedom) < 5 * np.sqrt(2 * freedom)


def test_neighbours_are_spread_as_independent_draws() -> None:
    """Distances of neighbours in an epoch of 10 million are those of independent draws."""
    size, n = 10_000_000, 100_000
    found = permute(np.arange(n), size, 1, 2)
    distances = np.abs(np.diff(found)) / size
    assert abs(distances.mean() - 1 / 3) < 5 * np.sqrt(1 / 18 / n)
    assert abs(np.corrcoef(found[:-1], found[1:])[0, 1]) < 5 / np.sqrt(n)
    assert abs(np.corrcoef(np.arange(n), found)[0, 1]) < 5 / np.sqrt(n)


def test_permutation_is_stable_between_versions() -> None:
    assert permute(np.arange(4), 2_000_000, 42, 3).tolist() == [714538, 1529489, 677705, 226084]


@pytest.mark.parametrize("size", [0, 2**32 + 1])
def test_invalid_sizes_are_refused(size: int) -> None:
    with pytest.raises(ValueError, match="must be 1 to"):
        permute(np.arange(1), size, 0, 0)
