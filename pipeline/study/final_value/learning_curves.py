"""Learning curves: a metric over a run, on a scale on which curves of many metrics are alike.

A point is a share of the run's steps, in (0, 1], and the logarithm of an error, so that power laws
are lines over the logarithm of the share, and the error of one metric compares with another's.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.bounded_read import read_json
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

    Of several evaluations in a 40th of the run, the last counts, and of training losses the mean,
    since the loss of a single step is noise. Values that aren't finite are left out.
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
    steps. Raises DataError and OSError if a file can't be read.
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
    final = None if is_trained else finite_number(dict(summary.get("metrics", {})).get(metric))
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
    """List the done runs of a recipe below a folder, in the order of their paths.

    Empty if there is no such folder.
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
