from __future__ import annotations

import numpy as np
import pytest

from pipeline.training.privacy.budget import bound_epsilon, compute_p_value


def answer_randomly(epsilon: float, count: int, seed: int) -> tuple[np.ndarray, np.ndarray]:
    """Scores of a mechanism with exactly this epsilon: randomized response."""
    rng = np.random.default_rng(seed)
    members = rng.random(count) < 0.5
    is_right = rng.random(count) < 1 / (1 + np.exp(-epsilon))
    return np.where(is_right == members, 1.0, -1.0) + 1e-3 * rng.random(count), members


@pytest.mark.medium
def test_bound_is_below_the_epsilon_of_randomized_response() -> None:
    bounds = [bound_epsilon(*answer_randomly(1.0, 1000, seed), 1e-5) for seed in range(20)]
    assert sum(bound > 1.0 for bound in bounds) <= 2
    assert np.median(bounds) > 0.6


def test_run_without_noise_is_refuted() -> None:
    """Planted mistake: noise off, so that scores tell members from others."""
    members = np.arange(200) % 2 == 0
    assert bound_epsilon(members.astype(float), members, 1e-5) > 3.0


def test_random_guesses_have_a_bound_of_zero() -> None:
    rng = np.random.default_rng(0)
    assert bound_epsilon(rng.random(500), rng.random(500) < 0.5, 1e-5) == 0.0


def test_non_finite_scores_are_guessed_last() -> None:
    members = np.array([True] * 50 + [False] * 50)
    scores = np.where(members, 1.0, np.nan)
    assert bound_epsilon(scores, members, 1e-5) > 2.0


def test_p_value_without_delta_is_a_binomial_tail() -> None:
    # 8 or more heads of 10: (45 + 10 + 1) / 1024
    np.testing.assert_allclose(compute_p_value(8, 10, 10, 0.0, 0.0), 56 / 1024)
    assert compute_p_value(8, 10, 10, 0.0, 1e-3) > 56 / 1024


def test_no_canary_is_guessed_twice() -> None:
    """With 11 canaries, no more than 10 are guessed; all guesses are right."""
    members = np.arange(11) < 5
    scores = -np.arange(11.0)
    # 5 of the best and 5 of the worst, as of 10 canaries
    even = bound_epsilon(np.delete(scores, 5), np.delete(members, 5), 0.0)
    assert bound_epsilon(scores, members, 0.0) == pytest.approx(even, abs=1e-3)
    assert even > 0.5
