"""Extrapolation of a learning curve: the distribution of its last point, from its first points.

A ridge regression over whole curves predicts how far the error still falls, from slopes and noise
of the curve so far. Its error is measured on curves of groups that it hasn't seen: for each group,
the regression without it is compared with its curves (cross-conformal prediction, Vovk 2015). A
second regression predicts how large such a residual is, so that steady curves get narrow intervals.
Everything is a function of the curves alone.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from pipeline.study.final_value.learning_curves import LearningCurve

MIN_POINTS = 3
"""Fewest points from which a curve is extrapolated."""
CONFIRMATIONS = 3
"""Number of points at which a chance must be low."""
RIDGE = 10.0
RESIDUAL_RIDGE = 30.0
"""Penalties of the two regressions, beside as many curves as there are."""
SOFT_LIMIT = 2.5
"""Features beyond this many quartile distances count little more, since few curves are there."""
LEAST_RESIDUAL = 0.003
"""Residual, as a logarithm of an error, below which residuals aren't told apart."""
SMOOTHING = 0.3
"""Width of the kernel over standardized residuals, by which no chance is 0."""


@dataclass(frozen=True)
class FinalError:
    """The distribution of a curve's last error: samples with weights that add up to 1."""

    samples: np.ndarray
    """Logarithms of the error, float (m,), ascending."""
    weights: np.ndarray
    width: float
    """Width of the kernel around each sample."""

    def quantile(self, share: float) -> float:
        """Return the error below which a share of the distribution is."""
        middles = np.cumsum(self.weights) - self.weights / 2
        return float(np.interp(share, middles, self.samples))

    def limit(self, most: float) -> FinalError:
        """Return the distribution with errors above `most` at `most`."""
        return replace(self, samples=np.minimum(self.samples, most))

    def chance_below(self, error: float) -> float:
        """Return the share of the distribution below an error, by a logistic kernel."""
        distances = np.clip((error - self.samples) / self.width, -300, 300)
        return float(self.weights @ (1 / (1 + np.exp(-1.7 * distances))))


def extrapolate(
    shares: np.ndarray, errors: np.ndarray, curves: Sequence[LearningCurve]
) -> FinalError:
    """Return the distribution of the last error of a curve of which the first points are known.

    `shares` and `errors` are float (n,), with n of at least `MIN_POINTS`. `curves` are of at least
    two groups; each is read at the same shares.
    """
    first_errors = np.array([np.interp(shares, curve.shares, curve.errors) for curve in curves])
    final = np.array([curve.errors[-1] for curve in curves])
    _, groups, sizes = np.unique(
        [curve.group for curve in curves], return_inverse=True, return_counts=True
    )
    weights = len(curves) / len(sizes) / sizes[groups]
    features, levels = _describe(shares, np.vstack([first_errors, errors]))
    inputs = _standardize(features)
    rows, query = inputs[:-1], inputs[-1]
    falls = final - levels[:-1]
    fall, predicted = _regress(rows, falls, weights, groups, query, RIDGE)
    residuals = falls - predicted
    sizes_of_residuals = np.log(np.abs(residuals) + LEAST_RESIDUAL)
    log_size, log_sizes = _regress(rows, sizes_of_residuals, weights, groups, query, RESIDUAL_RIDGE)
    size = math.exp(float(np.clip(log_size, -7, 3)))
    standardized = residuals / np.exp(np.clip(log_sizes, -7, 3))
    order = np.argsort(standardized, kind="stable")
    samples = levels[-1] + fall + size * standardized[order]
    return FinalError(samples, weights[order] / weights.sum(), SMOOTHING * size)


def find_highest_chance(
    shares: np.ndarray,
    errors: np.ndarray,
    shipped: Sequence[LearningCurve],
    done: Sequence[LearningCurve],
    best: float,
    enough: float = 1.0,
) -> float | None:
    """Return the chance that a curve ends below the error `best`, at its highest.

    The best run of a sweep differs from the others, and a test after each point finds a low chance
    sooner or later. So the chance is the highest by the shipped curves alone and beside
    the sweep's `done` curves, at each of the last `CONFIRMATIONS` points. None for too few points.
    Ends early if the chance is `enough`.
    """
    counts = range(len(shares) - CONFIRMATIONS + 1, len(shares) + 1)
    if counts[0] < MIN_POINTS:
        return None
    highest = 0.0
    for count in reversed(counts):
        for curves in (shipped, [*shipped, *done]):
            final = extrapolate(shares[:count], errors[:count], curves)
            highest = max(highest, final.chance_below(best))
            if highest >= enough:
                return highest
    return highest


def _describe(shares: np.ndarray, errors: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return features, float (m, 7), and levels, float (m,), of the points of m curves.

    Features: slopes over the logarithm of the share, from a quarter and from half of the last share
    on; the first line's end and residual; the falls from the first, to the last and to the best
    point. The level isn't one: few groups share it, so it would tell groups apart.
    """
    count = len(shares)
    level = errors[:, -max(1, count // 5) :].mean(axis=1)
    end, slope, noise = _fit_lines(shares, errors, shares[-1] / 4)
    _, recent_slope, _ = _fit_lines(shares, errors, shares[-1] / 2)
    columns = [slope, recent_slope, end - level, noise, errors[:, 0] - level]
    columns += [errors[:, -1] - level, errors.min(axis=1) - level]
    return np.stack(columns, axis=1), level


def _fit_lines(
    shares: np.ndarray, errors: np.ndarray, first: float
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Return ends, slopes and residual deviations of lines through the points from `first` on."""
    is_used = shares >= first - 1e-9
    times = np.log(shares[is_used] / shares[-1])
    if len(times) < 2:
        return errors[:, -1], np.zeros(len(errors)), np.zeros(len(errors))
    design = np.stack([np.ones_like(times), times], axis=1)
    lines = np.linalg.lstsq(design, errors[:, is_used].T, rcond=None)[0]
    squares = np.sum((errors[:, is_used].T - design @ lines) ** 2, axis=0)
    return lines[0], lines[1], np.sqrt(squares / max(1, len(times) - 2))


def _standardize(features: np.ndarray) -> np.ndarray:
    """Return features over their quartile distances, softly limited, after a column of ones."""
    low, middle, high = np.percentile(features[:-1], (25, 50, 75), axis=0)
    scaled = (features - middle) / (high - low + 1e-3)
    limited = SOFT_LIMIT * np.tanh(scaled / SOFT_LIMIT)
    return np.concatenate([np.ones((len(features), 1)), limited], axis=1)


def _regress(
    rows: np.ndarray,
    targets: np.ndarray,
    weights: np.ndarray,
    groups: np.ndarray,
    query: np.ndarray,
    ridge: float,
) -> tuple[float, np.ndarray]:
    """Return the prediction for `query`, and for each row the one without the row's group."""
    size = rows.shape[1]
    count = int(groups.max()) + 1
    weighted = rows * weights[:, None]
    penalty = ridge * np.eye(size)
    penalty[0, 0] = 1e-6
    grams = np.zeros((count, size, size))
    np.add.at(grams, groups, weighted[:, :, None] * rows[:, None, :])
    sums = np.zeros((count, size))
    np.add.at(sums, groups, weighted * targets[:, None])
    gram, total = grams.sum(axis=0) + penalty, sums.sum(axis=0)
    without = np.linalg.solve(gram - grams, (total - sums)[:, :, None])[:, :, 0]
    predicted = np.einsum("ij,ij->i", rows, without[groups])
    return float(query @ np.linalg.solve(gram, total)), predicted
