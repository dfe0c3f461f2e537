"""Scores of modelled times and their intervals against published ones."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
from scipy.stats import kstest, norm

from pipeline.backends.ascend.cost.efficiency import NORMAL_90
from pipeline.backends.ascend.published.workloads import Published


@dataclass(frozen=True)
class PricedRow:
    """A published row, its modelled time, and the 80 % interval of the published time.

    The time's log is normal around the interval's centre, which may be another than the modelled
    time.
    """

    row: Published
    modelled_ms: float
    low_ms: float
    high_ms: float

    @property
    def error(self) -> float:
        """Relative error of the modelled time, 0.1 if it is 10 % too long."""
        return self.modelled_ms / self.row.ms - 1

    @property
    def inside(self) -> bool:
        """Whether the published time is in the interval."""
        return self.low_ms <= self.row.ms <= self.high_ms

    @property
    def log_sd(self) -> float:
        """Standard deviation of the log of the time, a normal distribution with this interval."""
        return math.log(self.high_ms / self.low_ms) / (2 * NORMAL_90)

    @property
    def deviation(self) -> float:
        """Log of (published time / the interval's centre), in units of `log_sd`."""
        return math.log(self.row.ms / math.sqrt(self.low_ms * self.high_ms)) / self.log_sd

    @property
    def crps(self) -> float:
        """Continuous ranked probability score of the log of the published time; 0 is the best.

        The closed form for a normal distribution (Gneiting and Raftery 2007, section 4.2).
        """
        z = self.deviation
        error_term = z * (2 * norm.cdf(z) - 1)
        spread_term = 2 * norm.pdf(z) - 1 / math.sqrt(math.pi)
        return float(self.log_sd * (error_term + spread_term))


@dataclass(frozen=True)
class Score:
    """Errors, rank order and calibration of modelled times. Errors are relative, without sign."""

    rows: int
    """Number of rows."""
    median_error: float
    mean_error: float
    worst_error: float
    kendall_tau: float
    """Rank correlation of published and modelled times."""
    coverage: float
    """Share of published times in their 80 % intervals."""
    crps: float
    """Mean of `PricedRow.crps`."""
    ks: float
    """Kolmogorov-Smirnov distance from the uniform distribution. Its samples are the quantiles of
    the published times in the modelled distributions; 0 if these are right at every level."""

    def __str__(self) -> str:
        return (
            f"{self.rows} rows, error median {self.median_error:.1%}, mean {self.mean_error:.1%}, "
            f"worst {self.worst_error:.0%}; Kendall tau {self.kendall_tau:.2f}; "
            f"{self.coverage:.0%} inside the 80 % interval, CRPS {self.crps:.3f}, "
            f"K-S distance {self.ks:.2f}"
        )


def score(priced_rows: Sequence[PricedRow]) -> Score:
    """Return the score of rows."""
    errors = np.array([abs(priced_row.error) for priced_row in priced_rows])
    published_ms = [priced_row.row.ms for priced_row in priced_rows]
    modelled_ms = [priced_row.modelled_ms for priced_row in priced_rows]
    quantiles = [norm.cdf(priced_row.deviation) for priced_row in priced_rows]
    return Score(
        rows=len(priced_rows),
        median_error=float(np.median(errors)),
        mean_error=float(errors.mean()),
        worst_error=float(errors.max()),
        kendall_tau=kendall_tau(published_ms, modelled_ms),
        coverage=float(np.mean([priced_row.inside for priced_row in priced_rows])),
        crps=float(np.mean([priced_row.crps for priced_row in priced_rows])),
        ks=float(kstest(quantiles, "uniform").statistic),
    )


def kendall_tau(first: Sequence[float], second: Sequence[float]) -> float:
    """Return Kendall's tau over the pairs of positions that are tied in neither sequence.

    It is NaN if all are tied (Kendall 1938).
    """
    upper = np.triu_indices(len(first), 1)
    first_signs = np.sign(np.subtract.outer(first, first))[upper]
    second_signs = np.sign(np.subtract.outer(second, second))[upper]
    agreement = first_signs * second_signs  # 1: same order, -1: opposite order, 0: tied.
    return float(agreement.sum() / np.count_nonzero(agreement)) if np.any(agreement) else math.nan
