"""Searches of tilings: what experience prunes, and what the network learns (A-02)."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from pipeline.backends.ascend.cost.tiling import Product
from pipeline.backends.ascend.tune import tile_search
from pipeline.backends.ascend.tune.tile_search import Objective, Search, search_tiles
from tests.backends.ascend.made_up import HW

PRODUCTS = (
    Product(1, 288, 98, 32, 1.0, 4, 32),
    Product(12, 8, 4, 8, 1.0, 2),
    Product(1, 3, 5, 7, 1.0, 2),
    Product(1, 2, 576, 256, 1.0, 2),
)
OVERLAP = 1.25


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
