"""Scores of membership, and how well they separate members from held-out samples."""

from __future__ import annotations

import math
from dataclasses import dataclass

import numpy as np

FALSE_POSITIVE_RATES = (0.001, 0.01)
SEPARATE_VARIANCE_SHADOWS = 64
"""Fewer shadow networks share the variance of all samples (Carlini et al. 2022, section VI-D)."""
LEAST_SHADOWS = 4
"""Two with and two without each sample, which is the least that has a variance."""


@dataclass(frozen=True)
class MembershipRow:
    """How well an attack recognises members, at a limit of the false positive rate."""

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
        allowed = math.floor(rate * len(ordered) + 1e-9)
        caught = int((members > ordered[-allowed - 1]).sum()) if allowed else None
        share = None if caught is None else caught / len(members)
        limit = None if bound is None else bound.limit_rate(rate)
        rows.append(MembershipRow(attack, auc, error, rate, allowed, caught, share, limit))
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

    `margins` (n,) are log(p / (1 - p)) of each sample's class under the attacked network,
    `shadow_margins` (shadows, n) those under shadow networks, of which `was_trained_on`, bool
    (shadows, n), were trained on the sample. Margins of both groups of networks are assumed to be
    normal.
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
