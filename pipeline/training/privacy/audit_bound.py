"""A lower bound on epsilon, from guesses about the samples that a run was trained on.

A canary is a sample that is trained on with probability 1/2. Epsilon limits how often guesses about
this choice are right (Steinke, Nasr and Jagielski 2023, arXiv 2305.08846).
"""

from __future__ import annotations

import numpy as np

CONFIDENCE = 0.95
SHARES = (0.04, 0.1, 0.2, 0.5, 1.0)
"""Shares of the canaries about which guesses are made, those with the most certain guesses. Each
share has an equal part of the error probability, so the best of the bounds holds."""
_MAX_EPSILON = 50.0
"""The largest bound that is searched for."""


def bound_epsilon(scores: np.ndarray, are_members: np.ndarray, delta: float) -> float:
    """Return a lower bound on a run's epsilon, which holds with probability `CONFIDENCE`. The
    higher the score (n,), the more probably a canary was trained on. `are_members`, bool (n,), is
    whether it was. A score of NaN is the lowest."""
    order = np.argsort(-np.nan_to_num(scores, nan=-np.inf), kind="stable")
    are_members = are_members[order]
    num_canaries = len(scores)
    error = (1 - CONFIDENCE) / len(SHARES)
    best = 0.0
    for share in SHARES:
        # Guess that the canaries with the highest scores are members, and that the lowest, of
        # the same number, aren't.
        half = max(1, round(share * num_canaries / 2))
        num_right = int(are_members[:half].sum() + (~are_members[-half:]).sum())
        best = max(best, _find_bound(num_right, 2 * half, num_canaries, delta, error))
    return best


def _find_bound(num_right: int, num_guesses: int, count: int, delta: float, error: float) -> float:
    """Return the largest epsilon that is refuted with an error probability of at most `error`."""
    low = 0.0
    high = _MAX_EPSILON
    if compute_p_value(num_right, num_guesses, count, low, delta) > error:
        return 0.0
    while high - low > 1e-4:
        middle = (low + high) / 2
        if compute_p_value(num_right, num_guesses, count, middle, delta) > error:
            high = middle
        else:
            low = middle
    return low


def compute_p_value(
    num_right: int, num_guesses: int, count: int, epsilon: float, delta: float
) -> float:
    """Return a bound on the probability that at least `num_right` of `num_guesses` guesses about
    `count` canaries are right, if the run has this epsilon and delta (theorem 5.2)."""
    from scipy.stats import binom

    share = 1 / (1 + np.exp(-epsilon))
    fewer = binom.pmf(np.arange(num_right - 1, -1, -1), num_guesses, share).cumsum()
    weight = (fewer / np.arange(1, num_right + 1)).max(initial=0.0)
    probability = binom.sf(num_right - 1, num_guesses, share) + 2 * count * delta * weight
    return float(min(probability, 1.0))
