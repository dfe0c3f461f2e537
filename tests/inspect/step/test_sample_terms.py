"""Terms and gradients of single samples, compared with formulas in numpy."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pipeline.data.batch import Batch
from pipeline.inspect.dumps.opened_recipe import OpenedRecipe, open_recipe
from pipeline.inspect.step.sample_terms import SampleShares, measure_samples
from tests.conftest import compose_tiny

LINEAR = ("model=layers", "model.layers=[flatten,{name: dense, features: '$classes'}]")
"""Softmax regression, whose gradients have a formula."""


def open_linear(cache: Path, *overrides: str) -> OpenedRecipe:
    return open_recipe(compose_tiny(cache, *LINEAR, "train.loss.smoothing=0", *overrides))


def measure(opened: OpenedRecipe, batch: Batch | None = None) -> SampleShares:
    config = opened.built.step_config
    return measure_samples(config, opened.fresh_state(), batch or opened.batch(0))


def compute_in_numpy(opened: OpenedRecipe) -> tuple[np.ndarray, np.ndarray]:
    """Return the losses of the first batch, (B,), and their gradients, (B, weights)."""
    batch = opened.batch(0)
    ops = opened.built.step_config.train_ops
    from pipeline.data.transform import apply_ops

    columns = apply_ops(np, ops, batch.columns, batch.seed, batch.epoch, batch.sample)
    x = np.asarray(columns["image"], np.float64).reshape(len(batch.sample), -1)
    labels = np.asarray(columns["label"])
    params = opened.fresh_state().params["dense_0"]
    logits = x @ np.asarray(params["kernel"], np.float64) + np.asarray(params["bias"], np.float64)
    probabilities = np.exp(logits - logits.max(1, keepdims=True))
    probabilities /= probabilities.sum(1, keepdims=True)
    errors = probabilities - np.eye(logits.shape[1])[labels]
    losses = -np.log(probabilities[np.arange(len(labels)), labels])
    kernels = x[:, :, None] * errors[:, None, :]
    return losses, np.concatenate([errors, kernels.reshape(len(x), -1)], axis=1)


@pytest.mark.medium
@pytest.mark.parametrize("overrides", [(), ("train.accumulate_steps=2",)])
def test_terms_and_gradients_equal_formulas(cache: Path, overrides: tuple[str, ...]) -> None:
    opened = open_linear(cache, *overrides)
    shares = measure(opened)
    losses, gradients = compute_in_numpy(opened)
    mean = gradients.mean(0)
    np.testing.assert_allclose(shares.losses, losses, rtol=1e-5)
    np.testing.assert_allclose(shares.loss_shares, losses / losses.sum(), rtol=1e-5)
    norms = np.linalg.norm(gradients, axis=1) / len(losses)
    np.testing.assert_allclose(shares.gradient_norms, norms, rtol=1e-4)
    products = gradients @ mean / len(losses) / (mean @ mean)
    np.testing.assert_allclose(shares.gradient_shares, products, atol=1e-5)
    expected = [np.delete(losses, n).mean() for n in range(len(losses))]
    np.testing.assert_allclose(shares.other_losses, expected, rtol=1e-5)
    assert shares.are_finite.all()
    assert shares.loss == pytest.approx(losses.mean(), rel=1e-5)


@pytest.mark.medium
def test_sum_and_hardest_samples_have_their_terms(cache: Path) -> None:
    losses, _ = compute_in_numpy(open_linear(cache))
    summed = measure(open_linear(cache, "train.loss.reduction=sum"))
    np.testing.assert_allclose(summed.terms, losses, rtol=1e-5)
    np.testing.assert_allclose(summed.other_losses, losses.sum() - losses, rtol=1e-5)
    hardest = measure(open_linear(cache, "train.loss.hardest_share=0.25"))
    hardest_rows = np.argsort(-losses)[: len(losses) // 4]
    expected = np.zeros(len(losses))
    expected[hardest_rows] = losses[hardest_rows] / losses[hardest_rows].sum()
    np.testing.assert_allclose(hardest.loss_shares, expected, rtol=1e-5)
    assert (hardest.gradient_norms[expected == 0] == 0).all()
    assert (hardest.gradient_norms[hardest_rows] > 0).all()
    assert set(hardest.rank()[: len(hardest_rows)]) == set(hardest_rows)


def _replace_image(batch: Batch, position: int, value: Any) -> Batch:
    images = np.asarray(batch.columns["image"], np.float32)
    images[position] = value
    return replace(batch, columns={**batch.columns, "image": images})


@pytest.mark.medium
def test_samples_that_are_not_finite_are_first(cache: Path) -> None:
    opened = open_linear(cache)
    shares = measure(opened, _replace_image(opened.batch(0), 5, np.nan))
    assert shares.rank()[0] == 5
    assert np.flatnonzero(~shares.are_finite).tolist() == [5]
    assert np.isfinite(shares.other_losses[5])
    # The loss is finite, and the squares of its gradient overflow.
    shares = measure(opened, _replace_image(opened.batch(0), 7, 1e30))
    assert np.isfinite(shares.terms).all()
    assert np.flatnonzero(~shares.are_finite).tolist() == [7]
    assert shares.rank()[0] == 7


@pytest.mark.medium
def test_padding_has_no_row(cache: Path) -> None:
    opened = open_linear(cache)
    batch = replace(opened.batch(0), count=np.int32(10))
    shares = measure(opened, batch)
    losses, gradients = compute_in_numpy(opened)
    np.testing.assert_allclose(shares.loss_shares, losses[:10] / losses[:10].sum(), rtol=1e-5)
    norms = np.linalg.norm(gradients[:10], axis=1) / 10
    np.testing.assert_allclose(shares.gradient_norms, norms, rtol=1e-4)
