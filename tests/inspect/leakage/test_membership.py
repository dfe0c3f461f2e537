"""Figures of membership against counting by hand and formulas with known answers."""

from __future__ import annotations

import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from scipy.stats import mannwhitneyu, norm

from pipeline.inspect.leakage.membership import PrivacyBound, rate_scores, score_by_shadows

SCORES = st.lists(st.integers(-5, 5), min_size=1, max_size=30)


@pytest.mark.medium
@given(members=SCORES, held_out=SCORES)
def test_auc_is_the_statistic_of_mann_and_whitney(members: list[int], held_out: list[int]) -> None:
    rows = rate_scores("loss", np.array(members, float), np.array(held_out, float), None)
    pairs = len(members) * len(held_out)
    for rate in rows:
        assert rate.auc == pytest.approx(mannwhitneyu(members, held_out).statistic / pairs)
        assert rate.false_positives == math.floor(rate.false_positive_rate * len(held_out))
        assert rate.true_positives is None


@pytest.mark.medium
@given(st.integers(100, 2500), st.integers(0, 2**20))
def test_no_threshold_within_the_false_positives_catches_more(held: int, seed: int) -> None:
    generator = np.random.default_rng(seed)
    members = generator.integers(0, 40, 200).astype(float) + 3
    held_out = generator.integers(0, 40, held).astype(float)
    for rate in rate_scores("loss", members, held_out, None):
        best = max(
            int((members > threshold).sum())
            for threshold in [*np.unique(held_out), -1.0]
            if (held_out > threshold).sum() <= rate.false_positive_rate * held
        )
        if rate.true_positives is None:
            assert held * rate.false_positive_rate < 1
        else:
            assert rate.true_positives == best


def test_row_has_the_number_of_samples_of_its_rates() -> None:
    bound = PrivacyBound(math.log(3), 1e-5)
    few, enough = map(str, rate_scores("loss", np.arange(100.0) + 50, np.arange(100.0), bound))
    assert few.endswith("; 0.1% false positives are less than one, 1,000 held-out samples would do")
    assert enough.startswith("loss: AUC 0.8750 +- 0.02")
    assert enough.endswith(
        "; at 1.0% false positives (1 samples) true positives 0.5100 (51 members), "
        "at most 0.0300 by its privacy"
    )


@pytest.mark.medium
@given(st.floats(0, 5000), st.floats(0, 1e-3), st.sampled_from([0.001, 0.01]))
def test_bound_of_privacy_grows_from_guessing_to_certainty(
    epsilon: float, delta: float, rate: float
) -> None:
    limit = PrivacyBound(epsilon, delta).limit_rate(rate)
    assert rate <= limit <= 1
    assert PrivacyBound(0.0, 0.0).limit_rate(rate) == pytest.approx(rate)
    # The Gaussian mechanism of sensitivity 1 and noise 1 is (4.377, 1e-5)-private.
    exact = norm.cdf(norm.ppf(rate) + 1)
    assert exact <= PrivacyBound(4.377, 1e-5).limit_rate(rate)


@pytest.mark.parametrize("shadows", [16, 80])
def test_lira_recovers_the_ratio_of_normal_densities(shadows: int) -> None:
    generator = np.random.default_rng(3)
    samples = 400
    in_means = generator.normal(3, 2, samples)
    out_means = in_means - 1.5
    in_subset = generator.permuted(
        np.tile(np.arange(shadows)[:, None] % 2 == 0, (1, samples)), axis=0
    )
    means = np.where(in_subset, in_means, out_means)
    shadow_margins = means + generator.normal(0, 0.5, means.shape)
    is_member = np.arange(samples) % 2 == 0
    margins = np.where(is_member, in_means, out_means) + generator.normal(0, 0.5, samples)
    scores = score_by_shadows(margins, shadow_margins, in_subset)
    exact = norm.logpdf(margins, in_means, 0.5) - norm.logpdf(margins, out_means, 0.5)
    assert np.corrcoef(scores, exact)[0, 1] > 0.95
    lira = rate_scores("LiRA", scores[is_member], scores[~is_member], None)[0]
    loss = rate_scores("loss", margins[is_member], margins[~is_member], None)[0]
    assert lira.auc > 0.95 > 0.85 > loss.auc
