"""Earlier runs as the finished trials with which a study begins, and the choice of the next trial.

A Gaussian process over the results of a study chooses the next trial. Optuna's needs torch. A trial
is a point of the unit cube: a range is an axis that is scaled to 0..1, on a log scale by its
logarithm, and every choice of a list is an axis. Values are standardised. Formulas: Rasmussen and
Williams, Gaussian Processes for Machine Learning, 2006, equations 4.17 (Matern 5/2), 2.25, 2.26 and
2.30.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import numpy as np
import optuna
from optuna import Study
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler, TPESampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist
from scipy.stats import norm

from pipeline.config.overrides import get_key
from pipeline.config.recipe import Recipe
from pipeline.study.runs.recorded_run import MINOR, RecordedRun, flatten_keys, read_runs

EARLIER = "earlier_run"
"""Attribute of a trial that is an earlier run; its value is the run's directory."""
FREE_KEYS = ("name", *MINOR, "train.sink", "train.mechanism", "train.feed", "device.", "seed")
"""Prefixes of keys in which an earlier run may differ: they hardly change a result."""
WEIGHT_KEYS = ("checkpoint.restore", "checkpoint.rules", "checkpoint.renames", "checkpoint.partial")
"""Prefixes of keys that decide the initial weights of a run."""
RATE = "train.optimizer.lr"
BATCH_SIZE = "train.batch_size"

ACQUISITIONS: Mapping[str, Acquisition] = {"gp": "ei", "gp-pi": "pi", "gp-ucb": "ucb"}
"""Acquisition of a Gaussian process by the name of its sampler."""
FIRST_DRAWS = 5
"""Trials that a sampler draws at random before it uses results. With tpe's default of 10, a search
of three keys took twice the trials (docs/runs.md)."""
_ELEMENT = re.compile(r"\.\d+(\.|$)")
"""An index of a list, in a dotted key."""
Acquisition = Literal["ei", "pi", "ucb"]
NUM_CANDIDATES = 500
"""Points that are drawn at random for each trial; the best of them is tried."""
LENGTHS = np.geomspace(0.1, 3.0, 12)
NOISES = (1e-6, 1e-3, 1e-1)
"""Lengths of the kernel and variances of the noise, the likeliest of which are used."""
UCB_DEVIATIONS = 2.0


def read_trials(
    folder: Path, recipe: Recipe, space: Mapping[str, BaseDistribution], metric: str
) -> tuple[list[FrozenTrial], int]:
    """Return the runs below a folder as finished trials of a study, and the number of all runs.

    A run becomes a trial if it is done, has the metric and is in the search space. Its recipe may
    differ only in searched keys and `FREE_KEYS`. Raises DataError for a folder without a run.
    """
    runs = read_runs(folder, curves=False)
    recipe_keys = _unscale_rate(flatten_keys(recipe.model_dump(mode="json")), recipe)
    typed = (replace(run, keys=_unscale_rate(run.keys, recipe)) for run in runs)
    candidates = (_make_trial(run, recipe_keys, space, metric) for run in typed)
    return [trial for trial in candidates if trial is not None], len(runs)


def _unscale_rate(keys: Mapping[str, Any], recipe: Recipe) -> Mapping[str, Any]:
    """Return the keys of a run with the learning rate as `recipe` would have it typed.

    Runs record rates after `lr_for_batch` has scaled them.
    """
    rate = keys.get(RATE)
    batch_size = keys.get(BATCH_SIZE)
    if not isinstance(rate, int | float) or not isinstance(batch_size, int) or batch_size < 1:
        return keys
    return {**keys, RATE: recipe.train.optimizer.unscale_rate(rate, batch_size)}


def _make_trial(
    run: RecordedRun,
    recipe_keys: Mapping[str, Any],
    space: Mapping[str, BaseDistribution],
    metric: str,
) -> FrozenTrial | None:
    """Return a run as a trial; None if it doesn't fit the recipe and the search space."""
    value = run.figures.get(metric)
    if run.status != "done" or value is None or not math.isfinite(value):
        return None
    searched = {get_key(name) for name in space}
    keys = [key for key in {**recipe_keys, **run.keys} if not _is_free(key, searched)]
    if any(_differs(run, recipe_keys, key) for key in keys) or not searched <= run.keys.keys():
        return None
    params = {name: _find_param(run.keys[get_key(name)], space[name]) for name in space}
    if any(value is None for value in params.values()):
        return None
    return optuna.create_trial(
        params=params,
        distributions=dict(space),
        value=value,
        user_attrs={EARLIER: str(run.run_dir)},
    )


def _differs(run: RecordedRun, recipe_keys: Mapping[str, Any], key: str) -> bool:
    """Return whether a run has another value of a key than the recipe.

    A key that only the recipe has is newer than the run, which doesn't differ; but an element of a
    list that only the recipe has is a difference.
    """
    if key in run.keys and key in recipe_keys:
        return bool(run.keys[key] != recipe_keys[key])
    return key not in recipe_keys or _ELEMENT.search(key) is not None


def _is_free(key: str, searched: set[str]) -> bool:
    is_searched = any(key == name or key.startswith(f"{name}.") for name in searched)
    return is_searched or (key.startswith(FREE_KEYS) and not key.startswith(WEIGHT_KEYS))


def _find_param(value: Any, distribution: BaseDistribution) -> Any:
    """Return a run's value in the form of the search space; None if it is outside of the space."""
    if isinstance(distribution, CategoricalDistribution):
        # Choices are texts from the command line.
        for choice in distribution.choices:
            if _normalize_value(choice) == _normalize_value(value):
                return choice
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if distribution._contains(distribution.to_internal_repr(value)) else None


def _normalize_value(value: Any) -> float | str:
    """Return a value as a number if possible, else as text without spaces and capitals."""
    text = "null" if value is None else str(value).replace(" ", "").lower()
    try:
        return float(text)
    except ValueError:
        return text


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Return a Gaussian process with one of `ACQUISITIONS`, or Optuna's sampler tpe or random."""
    if name in ACQUISITIONS:
        return GaussianProcessSampler(ACQUISITIONS[name], seed, FIRST_DRAWS)
    if name == "random":
        return RandomSampler(seed)
    return TPESampler(seed=seed, constant_liar=True, n_startup_trials=FIRST_DRAWS)


def suggest_values(
    trials: Sequence[FrozenTrial],
    space: Mapping[str, BaseDistribution],
    count: int,
    *,
    sampler: BaseSampler,
    maximizes: bool,
) -> list[Mapping[str, Any]]:
    """Return values for `count` further runs; the sampler uses the results of `trials`."""
    study = optuna.create_study(direction="maximize" if maximizes else "minimize", sampler=sampler)
    study.add_trials(trials)
    return [dict(study.ask(dict(space)).params) for _ in range(count)]


def acquire(name: Acquisition, mean: np.ndarray, std: np.ndarray, best: float) -> np.ndarray:
    """Return the acquisition of points with predicted `mean` and `std`, all float64 (n,).

    `ei` is the expected improvement over `best`, `pi` the probability of an improvement, and `ucb`
    the upper confidence bound, `UCB_DEVIATIONS` standard deviations above the mean.
    """
    if name == "ucb":
        return mean + UCB_DEVIATIONS * std
    z = (mean - best) / std
    probability: np.ndarray = norm.cdf(z)
    return probability if name == "pi" else std * (z * probability + norm.pdf(z))


def predict(x: np.ndarray, y: np.ndarray, points: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Return mean and standard deviation at points (n, d), from values `y` (m,) at `x` (m, d)."""
    best_likelihood = -np.inf
    for length in LENGTHS:
        covariance = _compute_matern(x, x, length)
        for noise in NOISES:
            factor = cho_factor(covariance + noise * np.eye(len(x)), lower=True)
            weights = cho_solve(factor, y)
            log_likelihood = -y @ weights / 2 - np.log(np.diag(factor[0])).sum()
            if log_likelihood > best_likelihood:
                best_likelihood = log_likelihood
                best_length = length
                best_factor = factor
                best_weights = weights
    cross = _compute_matern(points, x, best_length)
    variance = 1 - (cross * cho_solve(best_factor, cross.T).T).sum(axis=1)
    return cross @ best_weights, np.sqrt(np.maximum(variance, 1e-12))


def _compute_matern(a: np.ndarray, b: np.ndarray, length: float) -> np.ndarray:
    """Return the covariances (m, n) of points `a` (m, d) and `b` (n, d)."""
    r = np.sqrt(5) * cdist(a, b) / length
    return np.asarray((1 + r + r**2 / 3) * np.exp(-r))


def encode(space: Mapping[str, BaseDistribution], values: Mapping[str, Any]) -> np.ndarray:
    """Return the point of the unit cube, float64 (d,), for values of a space's keys."""
    point: list[float] = []
    for name, distribution in space.items():
        number = distribution.to_internal_repr(values[name])
        if isinstance(distribution, CategoricalDistribution):
            point += [float(number == index) for index in range(len(distribution.choices))]
            continue
        assert isinstance(distribution, FloatDistribution | IntDistribution)
        ends = np.array([distribution.low, distribution.high, number])
        low, high, scaled = np.log(ends) if distribution.log else ends
        point.append((scaled - low) / (high - low))
    return np.array(point)


class GaussianProcessSampler(BaseSampler):
    """A sampler for Optuna that maximises an acquisition.

    Trials are drawn at random until `n_startup_trials` have ended with finite values. The value of
    a running trial is taken to be its predicted mean, so that trials at the same time differ.
    """

    def __init__(
        self, acquisition: Acquisition = "ei", seed: int | None = None, n_startup_trials: int = 5
    ) -> None:
        self._acquisition = acquisition
        self._n_startup_trials = n_startup_trials
        self._random = RandomSampler(seed)
        self._space = IntersectionSearchSpace()

    def infer_relative_search_space(
        self, study: Study, trial: FrozenTrial
    ) -> dict[str, BaseDistribution]:
        """Return the keys that all finished trials have."""
        space = self._space.calculate(study)
        return {name: values for name, values in space.items() if not values.single()}

    def sample_relative(
        self, study: Study, trial: FrozenTrial, search_space: dict[str, BaseDistribution]
    ) -> dict[str, Any]:
        """Return the values of the candidate with the largest acquisition."""
        done = study.get_trials(deepcopy=False, states=(TrialState.COMPLETE,))
        trials = [other for other in done if other.value is not None and np.isfinite(other.value)]
        if not search_space or len(trials) < self._n_startup_trials:
            return {}
        running = study.get_trials(deepcopy=False, states=(TrialState.RUNNING,))
        running = [other for other in running if other.params.keys() >= search_space.keys()]
        x = np.array([encode(search_space, other.params) for other in trials])
        values = np.array([other.value for other in trials])
        # Larger is better from here on.
        y = values if study.direction == StudyDirection.MAXIMIZE else -values
        y = (y - y.mean()) / (y.std() or 1.0)
        if running:
            running_x = np.array([encode(search_space, other.params) for other in running])
            predicted, _ = predict(x, y, running_x)
            x = np.concatenate([x, running_x])
            y = np.concatenate([y, predicted])
        candidates = [
            {
                key: self._random.sample_independent(study, trial, key, distribution)
                for key, distribution in search_space.items()
            }
            for _ in range(NUM_CANDIDATES)
        ]
        points = np.array([encode(search_space, candidate) for candidate in candidates])
        mean, std = predict(x, y, points)
        return candidates[int(acquire(self._acquisition, mean, std, y.max()).argmax())]

    def sample_independent(
        self, study: Study, trial: FrozenTrial, name: str, distribution: BaseDistribution
    ) -> Any:
        return self._random.sample_independent(study, trial, name, distribution)
