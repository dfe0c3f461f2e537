"""A cause is accepted by errors of networks that are left out, and by no others."""

from __future__ import annotations

import math

import pytest

from benchmarks.ascend_fit.causes import (
    ADDED_TIMES,
    CAUSES,
    COUNTS,
    AddedTime,
    CountedRow,
    compare_causes,
    compare_times,
    measure_network_errors,
    set_counts,
)
from benchmarks.ascend_fit.populations import Deviation, fit_interval_scale, leave_networks_out

LEVEL = [Deviation(f"n{number}", False, math.log(2)) for number in range(8)]
FAR = [*LEVEL[:-1], Deviation("n7", False, math.log(16))]


def test_error_of_a_network_is_from_a_fit_to_the_others() -> None:
    errors = measure_network_errors([*FAR, Deviation("n7", False, math.log(4))])
    assert errors["n7"] == pytest.approx((math.log(8) + math.log(2)) / 2, abs=1e-3)


def test_cause_that_brings_a_network_to_the_others_is_accepted() -> None:
    rows = [*FAR[:-2], Deviation("n6", False, math.log(8)), FAR[-1]]
    better = compare_causes({"tuned": rows}, {"tuned": LEVEL})
    assert better.is_accepted
    assert better.after == pytest.approx(0, abs=1e-3)
    assert better.networks == 8
    assert "accepted" in str(better)
    assert not compare_causes({"tuned": LEVEL}, {"tuned": rows}).is_accepted
    assert not compare_causes({"tuned": LEVEL}, {"tuned": LEVEL}).is_accepted


def test_interval_scale_covers_four_of_five_rows_that_are_left_out() -> None:
    rows = [Deviation(f"n{place}", False, (place * 7 % 10) / 10) for place in range(10)]
    limit = fit_interval_scale(rows) * 1.2816
    distances = [abs(row.log_error) / row.log_sd for row in leave_networks_out(rows)]
    assert sum(distance <= limit for distance in distances) == 8


def test_causes_are_named_with_the_passes_that_make_them() -> None:
    assert all(passes for passes in CAUSES.values())


def test_counts_are_relative_to_the_median_of_those_above_zero() -> None:
    rows = [
        CountedRow(Deviation(f"n{arrays}", arrays == 5, 0.0, 10.0), arrays, 7, 8, 1)
        for arrays in (2, 4, 5, 8)
    ]
    counts = [row.counts for row in set_counts(rows, ("graph", "array"))]
    assert counts == [(1, 0.5), (1, 1), (0, 0), (1, 2)]
    assert all(row.counts == () for row in set_counts(rows, ()))


@pytest.mark.slow
def test_time_of_each_array_is_found_where_it_made_the_rows() -> None:
    """Steps of 1.5 times (modelled + 0.4 ms an array) have no other time."""
    rows = []
    for place in range(16):
        modelled_ms, arrays = 3.0 * 1.4**place, (20, 200)[place % 2]
        log_ratio = math.log(1.5 * (modelled_ms + 0.4 * arrays) / modelled_ms)
        deviation = Deviation(f"n{place}", False, log_ratio, modelled_ms)
        rows.append(CountedRow(deviation, arrays, 9, 9, 1))
    own = compare_times(rows, AddedTime("of arrays", "tuned", ("array",), ("graph",)))
    assert own.is_accepted
    assert own.after < 0.1 < own.before
    other = compare_times(rows, AddedTime("of steps", "tuned", ("graph",), ("array",)))
    assert not other.is_accepted


def test_tried_times_are_of_known_counts_and_named_once() -> None:
    assert {name for time in ADDED_TIMES for name in (*time.before, *time.after)} == set(COUNTS)
    assert len({(time.name, time.population) for time in ADDED_TIMES}) == len(ADDED_TIMES)
