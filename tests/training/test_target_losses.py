"""Focal losses against their formulas in float64."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import Targets
from pipeline.training.losses import BinaryCrossEntropy, CrossEntropy
from pipeline.training.target_losses import BinaryFocal, Focal
from tests.training.loss_formulas import assert_agrees, softmax

GENERATOR = np.random.default_rng(5)
LOGITS = GENERATOR.normal(0, 2, (4, 3, 4)).astype(np.float32)
LABELS = GENERATOR.integers(0, 4, (4, 3))
WHERE = GENERATOR.random((4, 3)) < 0.7
WEIGHTS = (1.0, 0.25, 3.0, 0.5)


def expect_focal(
    logits: np.ndarray, labels: np.ndarray, gamma: float, weights: tuple[float, ...] = ()
) -> float:
    """The mean over the labels of a sample; 0 without a label."""
    terms = []
    for row, label in zip(softmax(logits), labels, strict=True):
        weight = weights[label] if weights else 1
        terms.append(-weight * (1 - row[label]) ** gamma * math.log(row[label]))
    return float(np.mean(terms)) if terms else 0.0


@pytest.mark.medium
@pytest.mark.parametrize("gamma", [0.5, 2.0, 3.3])
@pytest.mark.parametrize("weights", [(), WEIGHTS])
def test_focal_has_the_value_and_gradient_of_its_formula(
    gamma: float, weights: tuple[float, ...]
) -> None:
    loss = Focal(reduction="mean", gamma=gamma, class_weights=weights or None).build()
    for where in (None, WHERE):
        assert_agrees(loss, lambda x, y: expect_focal(x, y, gamma, weights), LOGITS, LABELS, where)


@pytest.mark.medium
def test_gamma_of_zero_is_cross_entropy() -> None:
    plain = CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="uniform").build()
    losses = Focal(reduction="mean", gamma=0.0).build()(LOGITS, jnp.asarray(LABELS))
    np.testing.assert_allclose(losses, plain(LOGITS, jnp.asarray(LABELS)), rtol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("weights", [None, WEIGHTS])
def test_loss_of_mixed_labels_is_the_mixture_of_losses(
    weights: tuple[float, ...] | None,
) -> None:
    loss = Focal(reduction="mean", class_weights=weights).build()
    logits, first, second = LOGITS[:, 0], LABELS[:, 0], LABELS[:, 1]
    mixed = 0.3 * np.eye(4)[first] + 0.7 * np.eye(4)[second]
    parts = (loss(logits, jnp.asarray(labels)) for labels in (first, second))
    expected = 0.3 * next(parts) + 0.7 * next(parts)
    np.testing.assert_allclose(loss(logits, jnp.asarray(mixed, jnp.float32)), expected, rtol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize("gamma", [0.0, 0.5, 1.0, 2.0])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_certain_predictions_have_finite_losses_and_gradients(gamma: float, dtype: str) -> None:
    """The slope of u^0.5 is infinite at u = 0, and probabilities round to 1."""
    logits = jnp.asarray([[200.0, -200, -200], [20.0, 0, 0], [0, 200.0, 0], [-200.0, 0, 1]], dtype)
    labels = jnp.zeros(4, jnp.int32)
    multi = Focal(reduction="mean", gamma=gamma).build()
    binary = BinaryFocal(reduction="mean", gamma=gamma, alpha=None).build()
    targets = jnp.asarray(np.eye(3)[[0, 0, 0, 0]], jnp.float32)
    for loss, given in ((multi, labels), (binary, targets)):
        losses = loss(logits, given)
        gradient = jax.grad(lambda x, loss=loss, given=given: loss(x, given).sum())(logits)
        assert losses.dtype == jnp.float32
        assert np.isfinite(losses).all()
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
        assert losses[0] == pytest.approx(0, abs=1e-6)
        assert losses[3] > 20


@pytest.mark.medium
@pytest.mark.parametrize("alpha", [None, 0.25])
@pytest.mark.parametrize("gamma", [0.5, 2.0])
def test_binary_focal_has_the_value_and_gradient_of_its_formula(
    alpha: float | None, gamma: float
) -> None:
    logits, labels = LOGITS[:, 0], (LABELS[:, :1] == np.arange(4)).astype(np.float32)

    def expect(logits: np.ndarray, labels: np.ndarray) -> float:
        terms = []
        for logit, label in zip(logits, labels, strict=True):
            right = 1 / (1 + math.exp(-logit if label else logit))
            weight = 1 if alpha is None else alpha if label else 1 - alpha
            terms.append(-weight * (1 - right) ** gamma * math.log(right))
        return float(np.mean(terms))

    loss = BinaryFocal(reduction="mean", gamma=gamma, alpha=alpha).build()
    assert_agrees(loss, expect, logits, labels)


@pytest.mark.medium
def test_binary_focal_without_weights_is_binary_cross_entropy() -> None:
    logits, labels = LOGITS[:, 0], jnp.asarray(np.eye(4)[LABELS[:, 0]], jnp.float32)
    losses = BinaryFocal(reduction="mean", gamma=0.0, alpha=None).build()(logits, labels)
    expected = BinaryCrossEntropy(reduction="mean").build()(logits, labels)
    np.testing.assert_allclose(losses, expected, rtol=1e-6)


def test_balanced_weights_are_those_of_the_classes() -> None:
    loss = Focal(reduction="mean", class_weights="balanced")
    assert loss.needs_class_counts
    fitted = loss.fit_to_targets(Targets(("ant", "bee"), counts=(3, 1)))
    assert fitted.class_weights == pytest.approx((4 / 6, 4 / 2))
    with pytest.raises(ValueError, match="class_weights has 3 values for 2 classes"):
        Focal(reduction="mean", class_weights=(1.0, 1.0, 1.0)).fit_to_targets(Targets(("a", "b")))


@pytest.mark.parametrize(
    ("loss", "keys"),
    [
        (Focal, {"gamma": -1.0}),
        (Focal, {"class_weights": (0.0, 1.0)}),
        (BinaryFocal, {"gamma": -1.0}),
        (BinaryFocal, {"alpha": 0.0}),
        (BinaryFocal, {"alpha": 1.0}),
    ],
)
def test_numbers_outside_their_range_are_refused(loss: type, keys: dict[str, object]) -> None:
    with pytest.raises(ValidationError, match=next(iter(keys))):
        loss(reduction="mean", **keys)
