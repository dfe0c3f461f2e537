"""Searches of tilings: what experience prunes, and what the network learns (A-02).

Rules of experience about tilings (A-02).
"""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.backends.ascend.cost.tiling import Product
from pipeline.backends.ascend.tune import tile_search
from pipeline.backends.ascend.tune.tile_search import (
    DEPTH_FACTOR,
    Objective,
    Search,
    rate_tilings,
    search_tiles,
)
from tests.backends.ascend.made_up import HW

PRODUCTS = (
    Product(1, 288, 98, 32, 1.0, 4, 32),
    Product(12, 8, 4, 8, 1.0, 2),
    Product(1, 3, 5, 7, 1.0, 2),
    Product(1, 2, 576, 256, 1.0, 2),
)
OVERLAP = 1.25
Tiling = tuple[int, int, int, int, int, int]


def searched(product: Product, mode: Any) -> Search:
    return search_tiles(Objective(product, HW, OVERLAP), mode, "key")


@pytest.mark.parametrize("product", PRODUCTS)
def test_genetic_search_with_few_trials_is_near_the_optimum(product: Product) -> None:
    genetic, exhaustive = searched(product, "ga"), searched(product, "exhaustive")
    assert genetic.trials < exhaustive.trials / 4
    assert genetic.us <= 1.02 * exhaustive.us


@pytest.mark.parametrize("product", PRODUCTS[:1])
def test_first_genetic_round_is_better_than_random_tilings(product: Product) -> None:
    """Against as many tilings that are drawn from all."""
    objective = Objective(product, HW, OVERLAP)
    rows = tile_search.list_tilings(product, HW)
    drawn = np.random.default_rng(0).choice(len(rows), (200, tile_search.POPULATION_COUNT))
    by_chance_us = np.median([objective.compute_times_us(rows[draw]).min() for draw in drawn])
    assert searched(product, "ga").rounds[0].best_us < by_chance_us


@pytest.mark.medium
def test_network_learns_to_choose_the_best_tiling_of_the_tree(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Untrained it chooses a single core."""
    product = PRODUCTS[0]
    objective = Objective(product, HW, OVERLAP)
    choices_us = []

    def watch(*arguments: Any) -> Any:
        genes = choose(*arguments)
        row = np.array([[*genes[:4], *objective.blocks[genes[4]]]], dtype=np.float64)
        choices_us.append(float(objective.compute_times_us(row)[0]))
        return genes

    choose = tile_search.choose_by_network
    untrained = tile_search.DecisionNetwork(np.random.default_rng(0))
    watch(untrained, objective)
    monkeypatch.setattr(tile_search, "choose_by_network", watch)
    result = searched(product, "rl")
    assert choices_us[-1] <= 1.1 * result.us
    assert choices_us[-1] < 0.5 * choices_us[0]


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
