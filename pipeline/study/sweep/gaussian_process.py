"""Gaussian process over the results of a study, which chooses the next trial.

Optuna's needs torch. A trial is a point of the unit cube: a range is an axis that is scaled to
0..1, on a log scale by its logarithm, and every choice of a list is an axis. Values are
standardised. Formulas: Rasmussen and Williams, Gaussian Processes for Machine Learning, 2006,
equations 4.17 (Matern 5/2), 2.25, 2.26 and 2.30.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal

import numpy as np
from optuna import Study
from optuna.distributions import (
    BaseDistribution,
    CategoricalDistribution,
    FloatDistribution,
    IntDistribution,
)
from optuna.samplers import BaseSampler, RandomSampler
from optuna.search_space import IntersectionSearchSpace
from optuna.study import StudyDirection
from optuna.trial import FrozenTrial, TrialState
from scipy.linalg import cho_factor, cho_solve
from scipy.spatial.distance import cdist
from scipy.stats import norm

Acquisition = Literal["ei", "pi", "ucb"]
NUM_CANDIDATES = 500
"""Points that are drawn at random for each trial; the best of them is tried."""
LENGTHS = np.geomspace(0.1, 3.0, 12)
NOISES = (1e-6, 1e-3, 1e-1)
"""Lengths of the kernel and variances of the noise, the likeliest of which are used."""
UCB_DEVIATIONS = 2.0


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
