"""Losses of positive numbers against scikit-learn, and the choice of a loss."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.data.columns import Targets
from pipeline.training.losses import BinaryCrossEntropy, CrossEntropy, Huber, Mse
from pipeline.training.number_losses import (
    AutoLoss,
    Gamma,
    Poisson,
    PositiveLoss,
    SquaredLog,
    choose_distribution,
)
from tests.conftest import ROOT

GOLDEN = np.load(ROOT / "tests" / "golden" / "table_network.npz")
MEAN, STD = 4.0, 3.0
TARGETS = Targets(("y",), "regression", (MEAN,), (STD,))


def standardise(numbers: Any) -> np.ndarray:
    return ((np.asarray(numbers) - MEAN) / STD).astype(np.float32)[:, None]


@pytest.mark.parametrize(
    ("loss", "numbers"),
    [(Poisson, "counts"), (Gamma, "numbers"), (SquaredLog, "counts")],
)
def test_deviance_golden_values_are_those_of_scikit_learn(
    loss: type[PositiveLoss], numbers: str
) -> None:
    fitted = loss(reduction="mean").fit_to_targets(TARGETS)
    means, actual = standardise(GOLDEN["means"]), standardise(GOLDEN[numbers])
    losses = fitted.build()(jnp.asarray(means), jnp.asarray(actual))
    expected = GOLDEN[fitted.name]
    np.testing.assert_allclose(losses, expected, rtol=2e-4, atol=2e-5)


@pytest.mark.parametrize("loss", [Poisson, Gamma, SquaredLog])
def test_outputs_below_zero_have_a_loss_and_gradient_that_lead_upwards(
    loss: type[PositiveLoss],
) -> None:
    fitted = loss(reduction="mean").fit_to_targets(TARGETS).build()
    outputs = jnp.asarray(standardise([-1e-2, 0.0, 1e-3, 4.0]))
    actual = jnp.asarray(standardise([4.0] * 4))
    losses = np.asarray(fitted(outputs, actual))
    slopes = np.asarray(jax.grad(lambda x: fitted(x, actual).sum())(outputs))[:, 0]
    assert np.isfinite(losses).all()
    assert np.isfinite(slopes).all()
    assert (np.diff(losses) < 0).all()
    assert (slopes[:3] < 0).all()


def test_number_out_of_the_range_of_a_loss_is_refused() -> None:
    with pytest.raises(ValueError, match=r"poisson needs numbers of at least 0, and y has -2;"):
        Poisson(reduction="mean").describe_targets(TARGETS, standardise([1, -2, 3]))
    with pytest.raises(ValueError, match=r"gamma needs numbers above 0, and y has 0;"):
        Gamma(reduction="mean").describe_targets(TARGETS, standardise([1, 0, 3]))
    targets, line = Poisson(reduction="mean").describe_targets(TARGETS, standardise([0, 1]))
    assert (targets.distribution, targets.is_positive, line) == ("poisson", True, "")


GENERATOR = np.random.default_rng(0)


@pytest.mark.parametrize(
    ("numbers", "distribution", "loss"),
    [
        (GENERATOR.poisson(3.0, 500), "poisson", Poisson),
        (GENERATOR.lognormal(0, 1.5, 500), "gamma", Gamma),
        (GENERATOR.lognormal(0, 1.5, 500) * (GENERATOR.random(500) < 0.5), "poisson", Poisson),
        (GENERATOR.standard_t(2, 5000), "tails", Huber),
        (GENERATOR.normal(size=500), "", Mse),
        (GENERATOR.poisson(400.0, 500), "", Mse),
    ],
    ids=["counts", "skewed", "skewed with zeros", "tails", "normal", "large counts"],
)
def test_auto_loss_suits_the_numbers(numbers: np.ndarray, distribution: str, loss: type) -> None:
    values = np.asarray(numbers, np.float64)[:, None]
    assert choose_distribution(values)[0] == distribution
    targets = Targets(("y",), "regression", (values.mean(),), (values.std(),))
    auto = AutoLoss(reduction="mean")
    described, line = auto.describe_targets(
        targets, ((values - values.mean()) / values.std()).astype(np.float32)
    )
    assert described.distribution == distribution
    assert line.startswith(f"loss: {loss.model_fields['name'].default}, since y ")
    assert line.endswith("loss=NAME chooses another")
    assert type(auto.fit_to_targets(described)) is loss


def test_auto_loss_of_classes_and_labels() -> None:
    auto = AutoLoss(reduction="mean", smoothing=0.1, class_weights="balanced")
    classes = Targets(("a", "b"), counts=(1, 3))
    assert auto.describe_targets(classes, np.array([0, 1, 1, 1])) == (classes, "")
    fitted = auto.fit_to_targets(classes)
    assert type(fitted) is CrossEntropy
    assert (fitted.smoothing, fitted.class_weights) == (0.1, (2.0, 2 / 3))
    labels = Targets(("a", "b"), "multi_label")
    assert type(AutoLoss(reduction="mean").fit_to_targets(labels)) is BinaryCrossEntropy


def test_distribution_is_saved_with_the_targets() -> None:
    from pipeline.stages.record.trained_run import _parse_targets

    targets = TARGETS.with_distribution("gamma")
    assert _parse_targets(("y",), targets.to_dict()) == targets
    assert "distribution" not in TARGETS.to_dict()
    with pytest.raises(ValueError, match="targets must be those of a run"):
        _parse_targets(("y",), {**targets.to_dict(), "distribution": "cauchy"})
