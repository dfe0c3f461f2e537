"""Learning curves: a metric over a run, on a scale on which curves of many metrics are alike, and
the distribution of a curve's last point, from its first points."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_json
from pipeline.core.files.tree_diff import find_value
from pipeline.engine.monitors.log_lines import EVALS, METRICS, finite_number, read_lines
from pipeline.stages.record.run_directory import SUMMARY
from pipeline.study.runs.ranking import TRAIN_LOSS, is_larger_better
from pipeline.study.runs.recorded_run import find_runs

TABLE = Path(__file__).with_name("learning_curves.npz")
POINTS = 40
"""A curve has at most this many points, spread evenly over the run."""
MAX_OWN_CURVES = 64
"""At most this many curves of the user's runs are used, the last ones by the paths of the runs."""
MAX_LOG_BYTES = 64 << 20
"""Largest log of a recorded run that is read."""
EPSILON = 0.005
"""Error that is added to a share that can be 1, such as an accuracy, before its logarithm."""
Scale = Literal["share", "gain", "cost"]
"""share: at most 1, and larger is better; gain: above 0, and larger is better; cost: above 0, and
smaller is better."""


@dataclass(frozen=True)
class LearningCurve:
    """The curve of a run that has ended."""

    group: str
    """Name of what resembles it: the family of a shipped curve, the directory of a user's run. All
    groups have the same weight."""
    shares: np.ndarray
    """Shares of the steps, float (n,), ascending to 1."""
    errors: np.ndarray
    """Logarithms of the errors, float (n,)."""


def choose_scale(metric: str, values: Sequence[float]) -> Scale:
    """Return the scale of a metric's values. Raises DataError if none fits."""
    finite = np.array(values)[np.isfinite(values)]
    if is_larger_better(metric) and np.all(finite <= 1):
        return "share"
    if np.all(finite > 0):
        return "gain" if is_larger_better(metric) else "cost"
    raise DataError(
        f"{metric}: has a value of {finite.min():.4g}, and an estimate needs positive values, or a "
        "metric that is at most 1 and better if larger"
    )


def to_errors(values: Any, scale: Scale) -> np.ndarray:
    """Return the logarithms of the errors of values; NaN for a value without one."""
    numbers = np.asarray(values, float)
    with np.errstate(invalid="ignore", divide="ignore"):
        if scale == "share":
            return np.log(1 + EPSILON - numbers)
        logarithms = np.log(np.where(numbers > 0, numbers, np.nan))
    return -logarithms if scale == "gain" else logarithms


def to_values(errors: Any, scale: Scale) -> np.ndarray:
    """Return the values of errors, the inverse of `to_errors`; a share is at most 1."""
    with np.errstate(over="ignore"):
        if scale == "share":
            return np.minimum(1.0, 1 + EPSILON - np.exp(errors))
        return np.exp(-np.asarray(errors) if scale == "gain" else np.asarray(errors))


def thin(steps: Sequence[int], values: Sequence[float], total: int, metric: str) -> np.ndarray:
    """Return at most `POINTS` points of a curve for a whole run, float (2, n): shares and values.

    `steps` ascend. Of several evaluations in a 40th of the run, the last counts, and of training
    losses the mean, since the loss of a single step is noise. Values that aren't finite are left
    out.
    """
    step = np.asarray(steps, float)
    value = np.asarray(values, float)
    is_kept = np.isfinite(value) & (step > 0)
    step, value = step[is_kept], value[is_kept]
    bins = np.ceil(POINTS * step / total - 1e-9)
    last = np.flatnonzero(np.diff(bins, append=np.inf))
    if metric == TRAIN_LOSS and len(step):
        first = np.concatenate([[0], last[:-1] + 1])
        value = np.add.reduceat(value, first) / (last - first + 1)
    else:
        value = value[last]
    return np.stack([step[last] / total, value])


def read_curve(run_dir: Path, metric: str, group: str) -> LearningCurve | None:
    """Read the curve of a run that is done; None if it has no such curve.

    The final value is of the evaluation after training, or the mean loss of the last 40th of the
    steps. Raises DataError, OSError and ValueError if a file can't be read.
    """
    summary = read_json(run_dir / SUMMARY)
    steps = summary.get("steps") if isinstance(summary, Mapping) else None
    if not isinstance(steps, int) or steps < 1 or summary.get("status") != "done":
        return None
    is_trained = metric == TRAIN_LOSS
    log = run_dir / (METRICS if is_trained else EVALS)
    if not log.is_file() or log.stat().st_size > MAX_LOG_BYTES:
        return None
    points = {}
    for line in read_lines(log):
        number = finite_number(line.fields.get("loss" if is_trained else metric))
        if number is not None:
            points[line.step] = number
    final = None if is_trained else finite_number(find_value(summary, ("metrics", metric)))
    if final is not None:
        points[steps] = final
    shares, values = thin(list(points), list(points.values()), steps, metric)
    if not len(shares) or shares[-1] < 1:
        return None
    errors = to_errors(values, choose_scale(metric, values.tolist()))
    return LearningCurve(group, shares, errors)


def read_own_curves(run_dirs: Iterable[Path], metric: str) -> list[LearningCurve]:
    """Read the curves of the user's runs, each a group; a run whose files can't be read has none.

    At most the last `MAX_OWN_CURVES` are returned.
    """
    curves: list[LearningCurve] = []
    for run_dir in reversed(list(run_dirs)):
        try:
            curve = read_curve(run_dir, metric, str(run_dir))
        except (DataError, OSError, ValueError):
            continue
        if curve is not None:
            curves.append(curve)
        if len(curves) == MAX_OWN_CURVES:
            break
    return curves[::-1]


@cache
def read_shipped_curves(kind: Literal["evaluation", "training"]) -> Sequence[LearningCurve]:
    """Return the shipped curves of an evaluation's metrics, or of training losses."""
    with np.load(TABLE) as table:
        errors = table[kind].astype(float)
        groups = table[f"{kind}_families"].tolist()
    shares = np.arange(1, POINTS + 1) / POINTS
    return [
        LearningCurve(group, shares[np.isfinite(row)], row[np.isfinite(row)])
        for group, row in zip(groups, errors, strict=True)
    ]


def list_recipe_runs(folder: Path, recipe_name: str, besides: Path) -> Sequence[Path]:
    """List the runs of a recipe below a folder that have ended, done or not, in the order of paths.

    Empty without the folder.
    """
    if not folder.is_dir():
        return []
    runs = []
    for run_dir in find_runs(folder):
        try:
            summary = read_json(run_dir / SUMMARY)
        except (OSError, ValueError):
            continue
        is_same = isinstance(summary, Mapping) and summary.get("recipe") == recipe_name
        if is_same and run_dir.resolve() != besides.resolve():
            runs.append(run_dir)
    return runs


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
        """Return the error below which a share of the samples is, without their kernels."""
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
    known_errors = np.array([np.interp(shares, curve.shares, curve.errors) for curve in curves])
    final = np.array([curve.errors[-1] for curve in curves])
    _, groups, counts = np.unique(
        [curve.group for curve in curves], return_inverse=True, return_counts=True
    )
    weights = len(curves) / len(counts) / counts[groups]
    features, levels = _describe(shares, np.vstack([known_errors, errors]))
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
    """Return features less their medians, over their quartile distances, softly limited, after a
    column of ones. The last row, which is asked for, doesn't count in medians and quartiles."""
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
