"""Sequential test of paired differences: valid after every pair, so it may stop at any of them.

If differences d_1, d_2, ... scatter symmetrically around m, the sign of each d_i - m is random,
whatever its size. The evidence against m is the capital of bets on these signs:

    product over i of 1 + tanh(b (d_i - m) / r_i),  r_i: root mean square of d_j - m for j <= i

This is the e-test of symmetry by likelihood ratio (Vovk and Wang 2024, "Nonparametric E-tests of
Symmetry") against normal differences whose mean is b standard deviations, averaged over `BETS`.
By Ville's inequality, the probability that the evidence against the true mean ever reaches
1 / `ERROR` is at most `ERROR`. The means whose evidence is lower are a confidence sequence (Howard
et al. 2021, "Time-uniform, nonparametric, nonasymptotic confidence sequences"). Differences of
equal sides are symmetric around 0 exactly.
"""

from __future__ import annotations

import math

import numpy as np

ERROR = 0.05
"""Upper bound of the probability that any interval of a sequence misses the mean, by default."""
BETS = {0.5: 0.2, 1.5: 0.4, 4.0: 0.4}
"""Mean in standard deviations that a bet expects, and the share of the capital on it."""
MIN_PAIRS = 6
"""Fewest pairs that can reject a mean: with fewer, random signs are too often equal."""
GRID_POINTS = 2001
"""Means that are tested to find an interval."""
GRID_RANGES = 4
"""Distance of the outermost means from the differences, as a multiple of their range."""


def compute_evidence(differences: np.ndarray, mean: np.ndarray | float = 0.0) -> np.ndarray:
    """Return the evidence against each mean after each pair, float64 (*mean.shape, pairs).

    `differences` are float64 (pairs,). A difference that equals the mean changes nothing.
    """
    errors = differences - np.asarray(mean, np.float64)[..., None]
    counts = np.arange(1, len(differences) + 1)
    scales = np.sqrt(np.cumsum(errors**2, axis=-1) / counts)
    ratios = np.divide(errors, scales, out=np.zeros_like(errors), where=scales > 0)
    evidence = np.zeros_like(errors)
    for bet, share in BETS.items():
        for sign in (1, -1):
            # log(1 + tanh(x)), also if tanh(x) is rounded to -1
            gains = math.log(2) - np.logaddexp(0, -2 * sign * bet * ratios)
            evidence += share / 2 * np.exp(np.cumsum(gains, axis=-1))
    return evidence


def compute_interval(differences: np.ndarray, error: float = ERROR) -> tuple[float, float]:
    """Return the least and the greatest mean that `differences`, float64 (pairs,), don't reject.

    `error` bounds the probability of a miss. With fewer than `MIN_PAIRS` differences, these are
    -inf and inf.
    """
    low = float(differences.min(initial=math.inf))
    high = float(differences.max(initial=-math.inf))
    if len(differences) < MIN_PAIRS:
        return -math.inf, math.inf
    margin = GRID_RANGES * (high - low)
    means = np.linspace(low - margin, high + margin, GRID_POINTS)
    is_accepted = compute_evidence(differences, means)[:, -1] < 1 / error
    if low == high or not is_accepted.any():
        return low, high
    first = int(is_accepted.argmax())
    last = GRID_POINTS - 1 - int(is_accepted[::-1].argmax())
    # The next mean outside is rejected; the end of the interval is between them.
    return float(means[max(first - 1, 0)]), float(means[min(last + 1, GRID_POINTS - 1)])


def count_pairs_to_decide(differences: np.ndarray, error: float = ERROR) -> int | None:
    """Return the least n for which the interval of the first n differences excludes 0, or None.

    For equal sides, `error` is the upper bound of the probability of such an n.
    """
    if len(differences) < MIN_PAIRS:
        return None
    evidence = compute_evidence(differences)
    for index in np.flatnonzero(evidence >= 1 / error):
        low, high = compute_interval(differences[: index + 1], error)
        if low > 0 or high < 0:
            return int(index) + 1
    return None


def count_unpaired_runs(values: np.ndarray, other_values: np.ndarray) -> int | None:
    """Return how many runs of both sides, with separate seeds, would be as precise as the pairs.

    `values` and `other_values`, float64 (pairs,), are the sides. Then the mean difference has the
    same variance. Returns None if all differences are equal, but for rounding.
    """
    paired = float((other_values - values).var())
    largest = float(np.abs([values, other_values]).max())
    if paired <= (4 * np.finfo(float).eps * largest) ** 2:
        return None
    unpaired = float(values.var() + other_values.var())
    return 2 * math.ceil(len(values) * unpaired / paired)
