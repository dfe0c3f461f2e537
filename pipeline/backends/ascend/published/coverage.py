"""Observed coverage of modelled intervals: how many published times an interval of a level has."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
from scipy.stats import norm

from pipeline.core.files.value_text import count_noun
from pipeline.core.pages.charts import Curve, draw_curves
from pipeline.core.pages.drawing import Drawing

LEVELS = np.arange(1, 20) / 20
"""Nominal coverages from 5 to 95 %."""


def observe_coverage(deviations: Sequence[float], levels: np.ndarray = LEVELS) -> np.ndarray:
    """Return the share of published times in the central interval of each nominal coverage.

    `deviations` are in standard deviations of a normal distribution, from its centre.
    """
    widths = norm.ppf(0.5 + levels / 2)
    return np.mean(np.abs(np.asarray(deviations)) <= widths[:, None], axis=1)


def draw_coverage(groups: Mapping[str, Sequence[float]]) -> Drawing:
    """Return a chart of the observed by the nominal coverage of groups of deviations."""
    curves = [
        Curve(f"{name}, {count_noun(len(group), 'step')}", LEVELS, observe_coverage(group))
        for name, group in groups.items()
    ]
    chart = draw_curves(
        "Observed coverage of intervals",
        [Curve("as nominal", LEVELS, LEVELS), *curves],
        "nominal coverage",
    )
    assert chart is not None
    return chart
