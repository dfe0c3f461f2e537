from __future__ import annotations

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.robustness.attack_losses import (
    LOSSES,
    AttackedNetwork,
    compute_logits_ratio,
    compute_margin,
)

LOGITS = jnp.array([[3.0, 1.0, 0.5, -2.0], [0.0, 4.0, 1.0, 3.0], [1.0, 2.0, 5.0, 4.0]])
LABELS = jnp.array([0, 3, 2])


@pytest.mark.medium
def test_losses_match_hand_computed_values() -> None:
    np.testing.assert_allclose(compute_margin(LOGITS, LABELS), [-2, 1, -1])
    np.testing.assert_allclose(
        compute_logits_ratio(LOGITS, LABELS), [-2 / 2.5, 1 / 3, -1 / 3], rtol=1e-6
    )
    expected = np.log(np.exp(np.asarray(LOGITS)).sum(1)) - np.asarray(LOGITS)[range(3), LABELS]
    np.testing.assert_allclose(LOSSES["ce"](LOGITS, LABELS), expected, rtol=1e-6)


@pytest.mark.medium
def test_ratio_does_not_depend_on_scale_and_shift() -> None:
    expected = compute_logits_ratio(LOGITS, LABELS)
    np.testing.assert_allclose(compute_logits_ratio(100 * LOGITS + 7, LABELS), expected, rtol=1e-5)


@pytest.mark.medium
def test_gradients_are_per_image() -> None:
    weights = jnp.asarray(np.random.default_rng(1).normal(size=(4, 3)), jnp.float32)
    attacked = AttackedNetwork(lambda p: p.reshape(len(p), -1) @ weights, jnp.array([0, 1]))
    pixels = jnp.asarray(np.random.default_rng(2).random((2, 2, 2, 1)), jnp.float32)
    losses, fooled, gradients = attacked.differentiate(LOSSES["ce"], pixels)
    logits = np.asarray(pixels.reshape(2, 4) @ weights)
    shares = np.exp(logits) / np.exp(logits).sum(1, keepdims=True)
    expected = (shares - np.eye(3)[[0, 1]]) @ np.asarray(weights).T
    np.testing.assert_allclose(gradients.reshape(2, 4), expected, atol=1e-5)
    np.testing.assert_array_equal(fooled, logits.argmax(1) != [0, 1])
    assert losses.shape == (2,)
