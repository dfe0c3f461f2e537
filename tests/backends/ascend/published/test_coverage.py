"""Observed coverage: counts by hand, and the chart's curves."""

from __future__ import annotations

from statistics import NormalDist

import numpy as np
import pytest

from pipeline.backends.ascend.published.coverage import LEVELS, draw_coverage, observe_coverage


def test_coverage_matches_counts() -> None:
    # These intervals end at 0.84, 1.04, 1.96 and 2.05 deviations.
    levels = np.array([0.6, 0.7, 0.95, 0.96])
    observed = observe_coverage([0.99, -1.05, 1.99, -2.1], levels)
    assert observed.tolist() == [0, 0.25, 0.5, 0.75]


def test_quantiles_of_the_normal_distribution_are_covered_as_nominal() -> None:
    quantiles = [NormalDist().inv_cdf((place + 0.5) / 1000) for place in range(1000)]
    assert observe_coverage(quantiles) == pytest.approx(LEVELS, abs=0.002)


def test_chart_names_each_group_and_its_steps() -> None:
    chart = draw_coverage({"fit": [0.1, 2.0], "look": [0.5]}).to_file_text()
    assert chart.startswith("<svg")
    for words in ("fit, 2 steps", "look, 1 step<", "as nominal", "nominal coverage"):
        assert words in chart
