"""The loss of ordered classes against its formula in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import Targets
from pipeline.training.losses import CrossEntropy
from pipeline.training.target_losses import Ordinal
from tests.training.loss_formulas import assert_agrees, softmax

GENERATOR = np.random.default_rng(6)
LOGITS = GENERATOR.normal(0, 2, (4, 3, 5)).astype(np.float32)
LABELS = GENERATOR.integers(0, 5, (4, 3))
LOSS = Ordinal(reduction="mean").build()


def expect(logits: np.ndarray, labels: np.ndarray) -> float:
    """The mean over labels and thresholds; 0 without a label."""
    terms = []
    for row, label in zip(softmax(logits), labels, strict=True):
        for threshold in range(len(row) - 1):
            above = row[threshold + 1 :].sum()
            terms.append(-math.log(above if label > threshold else 1 - above))
    return float(np.mean(terms)) if terms else 0.0


@pytest.mark.medium
def test_loss_has_the_value_and_gradient_of_its_formula() -> None:
    assert_agrees(LOSS, expect, LOGITS, LABELS)
    assert_agrees(LOSS, expect, LOGITS, LABELS, GENERATOR.random((4, 3)) < 0.6)


@pytest.mark.medium
def test_far_errors_cost_more_than_near_ones() -> None:
    logits = jnp.asarray(6 * np.eye(5)[[0] * 5], jnp.float32)
    losses = np.asarray(LOSS(logits, jnp.arange(5)))
    assert (np.diff(losses) > 1).all()


@pytest.mark.medium
def test_two_classes_have_cross_entropy() -> None:
    logits, labels = jnp.asarray(LOGITS[..., :2]), jnp.asarray(LABELS % 2)
    plain = CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="uniform").build()
    np.testing.assert_allclose(LOSS(logits, labels), plain(logits, labels), rtol=1e-5)


@pytest.mark.medium
def test_loss_of_mixed_labels_is_the_mixture_of_losses() -> None:
    logits, first, second = LOGITS[:, 0], LABELS[:, 0], LABELS[:, 1]
    mixed = jnp.asarray(0.3 * np.eye(5)[first] + 0.7 * np.eye(5)[second], jnp.float32)
    expected = 0.3 * LOSS(logits, jnp.asarray(first)) + 0.7 * LOSS(logits, jnp.asarray(second))
    np.testing.assert_allclose(LOSS(logits, mixed), expected, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_certain_predictions_have_finite_losses_and_gradients(dtype: str) -> None:
    logits = jnp.asarray([[300.0, 0, -300], [-300.0, 0, 300]], dtype)
    labels = jnp.zeros(2, jnp.int32)
    losses = LOSS(logits, labels)
    gradient = jax.grad(lambda x: LOSS(x, labels).sum())(logits)
    assert losses.dtype == jnp.float32
    np.testing.assert_allclose(losses, [0, 450], atol=1)
    assert np.isfinite(np.asarray(gradient, np.float32)).all()


def test_one_class_is_refused() -> None:
    with pytest.raises(ValueError, match="needs at least 2 classes, not 1"):
        Ordinal(reduction="mean").fit_to_targets(Targets(("ant",)))
