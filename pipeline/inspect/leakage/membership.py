"""Scores of membership, and rates of members and held-out samples that they identify."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

FALSE_POSITIVE_RATES = (0.001, 0.01)
SEPARATE_VARIANCE_SHADOWS = 64
"""With fewer shadow networks, one variance serves all samples (Carlini et al. 2022, VI-D)."""
LEAST_SHADOWS = 4
"""Two with and two without each sample: a variance needs two values."""


@dataclass(frozen=True)
class MembershipRow:
    """Success of an attack at a limit of the false positive rate."""

    attack: str
    auc: float
    """Probability that a member has a larger score than a held-out sample; 0.5 is a guess."""
    auc_error: float
    """Standard error of `auc` (Hanley and McNeil 1982)."""
    false_positive_rate: float
    false_positives: int
    """Held-out samples within the limit. The fewer they are, the less exact are the rates."""
    true_positives: int | None
    """Members that are recognised; None if the limit is less than one held-out sample."""
    true_positive_rate: float | None
    bound: float | None
    """The largest rate that differential privacy allows; None if the run isn't private."""

    def __str__(self) -> str:
        auc = f"{self.attack}: AUC {self.auc:.4f} +- {self.auc_error:.4f}"
        limit = f"{self.false_positive_rate:.1%} false positives"
        if self.true_positive_rate is None:
            least = math.ceil(1 / self.false_positive_rate)
            return f"{auc}; {limit} are less than one, {least:,} held-out samples would do"
        bound = "" if self.bound is None else f", at most {self.bound:.4f} by its privacy"
        return (
            f"{auc}; at {limit} ({self.false_positives:,} samples) true positives "
            f"{self.true_positive_rate:.4f} ({self.true_positives:,} members){bound}"
        )


@dataclass(frozen=True)
class PrivacyBound:
    """Differential privacy of a run."""

    epsilon: float
    delta: float

    def limit_rate(self, false_positive_rate: float) -> float:
        """Return the largest true positive rate (Kairouz et al. 2015, theorem 2.1)."""
        # exp overflows from 709 on; the second limit is then 1.
        factor = math.exp(min(self.epsilon, 700.0))
        return min(
            factor * false_positive_rate + self.delta,
            1 - (1 - self.delta - false_positive_rate) / factor,
            1.0,
        )


def rate_scores(
    attack: str, members: np.ndarray, held_out: np.ndarray, bound: PrivacyBound | None
) -> list[MembershipRow]:
    """Return a row for each of FALSE_POSITIVE_RATES; `members` (m,), `held_out` (n,) are scores."""
    ordered = np.sort(held_out)
    below = np.searchsorted(ordered, members, side="left")
    not_above = np.searchsorted(ordered, members, side="right")
    auc = float((below + not_above).mean() / 2 / len(ordered))
    error = _compute_auc_error(auc, len(members), len(ordered))
    rows = []
    for rate in FALSE_POSITIVE_RATES:
        # The product of a rate and a number of samples may be just below a whole number.
        max_false = math.floor(rate * len(ordered) + 1e-9)
        num_caught = int((members > ordered[-max_false - 1]).sum()) if max_false else None
        true_rate = None if num_caught is None else num_caught / len(members)
        max_rate = None if bound is None else bound.limit_rate(rate)
        rows.append(
            MembershipRow(attack, auc, error, rate, max_false, num_caught, true_rate, max_rate)
        )
    return rows


def _compute_auc_error(auc: float, members: int, held_out: int) -> float:
    """Return the standard error of an AUC (Hanley and McNeil 1982)."""
    pair_of_members = auc / (2 - auc) - auc**2
    pair_of_held_out = 2 * auc**2 / (1 + auc) - auc**2
    spread = auc * (1 - auc) + (members - 1) * pair_of_members + (held_out - 1) * pair_of_held_out
    return math.sqrt(max(spread, 0.0) / (members * held_out))


def score_by_shadows(
    margins: np.ndarray, shadow_margins: np.ndarray, was_trained_on: np.ndarray
) -> np.ndarray:
    """Return the likelihood ratio of membership, float64 (n,) (LiRA, Carlini et al. 2022).

    `margins` (n,) are log(p / (1 - p)) of each sample's class under the attacked network, and
    `shadow_margins` (shadows, n) under shadow networks. `was_trained_on`, bool (shadows, n), is
    whether a network was trained on a sample. Both groups' margins are assumed to be normal.
    """
    densities = []
    for group in (was_trained_on, ~was_trained_on):
        counts = group.sum(axis=0)
        means = np.where(group, shadow_margins, 0).sum(axis=0) / counts
        squares = np.where(group, shadow_margins - means, 0) ** 2
        variances = squares.sum(axis=0) / np.maximum(counts - 1, 1)
        if len(group) < SEPARATE_VARIANCE_SHADOWS:
            variances = np.full_like(variances, squares.sum() / (counts - 1).sum())
        variances = np.maximum(variances, 1e-12)
        densities.append(-((margins - means) ** 2) / (2 * variances) - np.log(variances) / 2)
    return np.asarray(densities[0] - densities[1])
