"""The fit of populations finds what made simulated rows, and reads no row of another part."""

from __future__ import annotations

import math

import numpy as np
import pytest

from benchmarks.ascend_fit.populations import Deviation, fit_population, measure_deviations
from pipeline.backends.ascend.published.scores import PricedRow, load_classes
from pipeline.backends.ascend.published.workloads import DESCRIBED, load_published_steps


@pytest.mark.slow
def test_fit_finds_the_factor_and_spreads_of_simulated_rows() -> None:
    rng = np.random.default_rng(0)
    rows = [
        Deviation(f"n{network}", network % 2 == 1, math.log(1.7) + deviation + rng.normal(0, 0.2))
        for network, deviation in enumerate(rng.normal(0, 0.5, 60))
        for _ in range(3)
    ]
    fitted = fit_population(rows)
    assert fitted["factor"] == pytest.approx(1.7, rel=0.15)
    assert fitted["network_log_sd"] == pytest.approx(0.5, rel=0.2)
    assert fitted["row_log_sd"] == pytest.approx(0.2, rel=0.2)
    assert fitted["mechanism_eager"] == pytest.approx(1, abs=0.15)


def test_factor_of_equal_networks_is_their_ratio() -> None:
    rows = [Deviation(f"n{n}", n % 2 == 0, math.log(2)) for n in range(8)]
    assert fit_population(rows)["factor"] == pytest.approx(2)


def test_eager_rows_that_are_slower_have_a_larger_factor() -> None:
    rows = [Deviation(f"n{n}", n % 2 == 0, 0.5 if n % 2 == 0 else 0.0) for n in range(40)]
    fitted = fit_population(rows)
    assert fitted["mechanism_eager"] > 1.1
    assert fitted["mechanism_graph"] < 0.9


@pytest.mark.parametrize("fixed", [False, True])
def test_fixed_time_of_a_graph_explains_slow_small_steps(fixed: bool) -> None:
    modelled_ms = [3.0 * 1.3**place for place in range(24)]
    rows = [
        Deviation(f"n{place}", False, math.log(1.5 * (ms + 20) / ms), ms)
        for place, ms in enumerate(modelled_ms)
    ]
    fitted = fit_population(rows, fixed=fixed)
    assert fitted["fixed_ms"] == pytest.approx(20 if fixed else 0, rel=0.1)
    assert fitted["factor"] == pytest.approx(1.5, rel=0.1) or not fixed
    assert (fitted["network_log_sd"] < 0.1) == fixed
    eager = Deviation("n", True, 1.0, 5.0)
    assert eager.add_fixed_ms(20) == 1


@pytest.mark.parametrize("population", ["tuned", "community"])
def test_rows_of_the_part_fit_alone_are_read(population: str) -> None:
    classes = load_classes()
    rows = load_published_steps(DESCRIBED)
    priced_rows = [PricedRow(row, row.ms / 2, row.ms / 4, row.ms) for row in rows]
    deviations = measure_deviations(priced_rows, population)
    expected = [
        classes[row.id].network
        for row in rows
        if (classes[row.id].part, classes[row.id].population) == ("fit", population)
    ]
    assert [deviation.network for deviation in deviations] == expected
    assert all(row.log_ratio == pytest.approx(math.log(2)) for row in deviations)
