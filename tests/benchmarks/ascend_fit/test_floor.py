"""Networks with several pages, and the spread between pages, by hand."""

from __future__ import annotations

import math
from dataclasses import replace

import pytest

from benchmarks.ascend_fit.floor import Pages, compute_errors, group_pages, measure_spread
from pipeline.backends.ascend.published.workloads import load_published_steps

ROW = replace(load_published_steps()[0], model="net", batch=32, precision="O2")


def test_pages_of_one_network_have_the_median_of_their_rows() -> None:
    first = [
        replace(ROW, ms=ms, source=f"owner/zoo net/README.md:L{line} (r1)")
        for line, ms in ((4, 32.0), (9, 64.0), (12, 96.0))
    ]
    second = replace(ROW, ms=256.0, batch=64, source="owner/zoo other/README.md:L4 (r1)")
    assert group_pages([*first, second]) == [Pages("net", (2.0, 4.0))]


@pytest.mark.parametrize(
    "change", [{"batch": 65}, {"precision": "O0"}, {"pixels": 7}, {"model": "net_2"}]
)
def test_rows_that_differ_are_not_of_one_network(change: dict[str, object]) -> None:
    other = replace(ROW, source="owner/zoo other/README.md:L4 (r1)", **change)  # type: ignore[arg-type]
    assert group_pages([ROW, other]) == []


def test_spread_is_within_networks() -> None:
    apart = [Pages("near", (1.0, 1.0)), Pages("far", (10.0, 10.0 * math.e))]
    assert measure_spread(apart) == pytest.approx(0.5)


def test_errors_match_the_formula_of_a_log_normal() -> None:
    # E|1 / x - 1| of a log-normal x with the median 1 is (2 N(s) - 1) e^(s^2 / 2), N the
    # distribution's function.
    s = 0.4
    mean, median = compute_errors(s)
    assert mean == pytest.approx(math.erf(s / math.sqrt(2)) * math.exp(s * s / 2), rel=2e-3)
    least, _ = compute_errors(s, -s * s)
    assert least < mean
    assert 0.2 < median < 0.3
