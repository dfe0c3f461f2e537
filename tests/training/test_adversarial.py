"""The losses of a generator and a discriminator against their formulas."""

from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.adversarial import AdversarialLoss, DiscriminatorLoss, GeneratorLoss

SCORES = np.random.default_rng(3).normal(0, 3, (7, 3)).astype(np.float32)
LABELS = np.tile(np.float32([1, 0, 1]), (7, 1))
PROBABILITIES = 1 / (1 + np.exp(-SCORES.astype(np.float64)))
JUDGE = -(np.log(PROBABILITIES[:, 0]) + np.log(1 - PROBABILITIES[:, 1])) / 2
GENERATOR = -np.log(PROBABILITIES[:, 2])


@pytest.mark.medium
def test_adversarial_loss_is_the_sum_of_both() -> None:
    loss = AdversarialLoss(reduction="mean").build()
    np.testing.assert_allclose(loss(SCORES, LABELS), JUDGE + GENERATOR, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("metric", "expected"), [(DiscriminatorLoss(), JUDGE), (GeneratorLoss(), GENERATOR)]
)
def test_metric_is_the_mean_over_valid_samples(
    metric: DiscriminatorLoss | GeneratorLoss, expected: np.ndarray
) -> None:
    mask = np.arange(7) < 5
    sums = metric.sums(jnp.asarray(SCORES), jnp.asarray(LABELS), jnp.asarray(mask))
    assert metric.value(sums) == pytest.approx(expected[:5].mean(), rel=1e-5)
