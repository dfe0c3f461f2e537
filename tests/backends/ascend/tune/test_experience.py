"""Rules of experience about tilings (A-02)."""

from __future__ import annotations

import numpy as np

from pipeline.backends.ascend.tune.experience import DEPTH_FACTOR, rate_tilings

Tiling = tuple[int, int, int, int, int, int]


def rate(limits: tuple[int, int, int, int], *tilings: Tiling) -> list[float]:
    rows = np.array(tilings, dtype=np.float64)
    return [float(rating) for rating in rate_tilings(limits, 32, rows)]


LARGE = (1, 64, 64, 64)


def test_even_split_into_square_blocks_is_rated_by_its_loads() -> None:
    assert rate(LARGE, (1, 8, 1, 4, 8, 8)) == [1 + 1 / 8 + 1 / 8]


def test_idle_cores_uneven_parts_and_flat_blocks_are_penalised() -> None:
    best, idle, uneven, flat = rate(
        LARGE, (1, 8, 1, 4, 8, 8), (1, 4, 1, 4, 8, 8), (1, 7, 1, 4, 8, 8), (1, 8, 1, 4, 1, 16)
    )
    assert idle == 2 * best
    assert best < uneven
    assert best < flat


def test_depth_split_is_preferred_only_for_narrow_products() -> None:
    whole, split = rate(LARGE, (1, 8, 1, 4, 8, 8), (1, 4, 2, 4, 8, 8))
    assert split == DEPTH_FACTOR * whole
    narrow = (1, 1, 512, 4)
    whole, split = rate(narrow, (1, 1, 1, 4, 1, 1), (1, 1, 8, 4, 1, 1))
    assert split < whole


def test_small_product_is_not_split_over_all_cores() -> None:
    one, all_cores = rate((1, 4, 4, 8), (1, 1, 1, 1, 4, 8), (1, 4, 1, 8, 1, 1))
    assert one < all_cores
