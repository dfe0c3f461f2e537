"""The interval of a population, by hand, and the package's fit."""

from __future__ import annotations

import math

import pytest

from pipeline.backends.ascend.cost.populations import Population, load_populations
from pipeline.backends.ascend.published.protocol import load_classes
from pipeline.backends.ascend.published.workloads import DESCRIBED, load_published_steps


def test_interval_matches_hand_calculation() -> None:
    population = Population(1.5, 0.9, 1.1, 0.1, 0.3, 0.4, 5, 2)
    # sqrt(0.3^2 + 0.4^2) = 0.5, and with 1.2 of another chip 1.3.
    for eager, centre in ((False, 13.5), (True, 16.5)):
        low, high = population.interval_ms(10, eager=eager)
        assert low == pytest.approx(centre / math.exp(0.5 * 1.2816))
        assert high == pytest.approx(centre * math.exp(0.5 * 1.2816))
    low, high = population.interval_ms(10, eager=False, chip_log_sd=1.2)
    assert math.log(high / low) == pytest.approx(2 * 1.3 * 1.2816)


def test_community_is_slower_and_wider_than_tuned_code() -> None:
    populations = load_populations()
    tuned, community = (populations.by_name[name] for name in ("tuned", "community"))
    assert community.factor > tuned.factor
    assert community.network_log_sd > tuned.network_log_sd
    assert populations.fits_tried >= 1


def test_populations_count_the_described_rows_of_the_part_fit() -> None:
    classes = load_classes()
    rows = [classes[row.id] for row in load_published_steps(DESCRIBED)]
    for name, population in load_populations().by_name.items():
        read = [row for row in rows if (row.part, row.population) == ("fit", name)]
        assert population.rows == len(read)
        assert population.networks == len({row.network for row in read})
