"""Losses of pairs and recall against formulas in float64."""

from __future__ import annotations

import math
from collections.abc import Callable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy.special import logsumexp, softmax

from pipeline.training import contrastive
from pipeline.training.contrastive import (
    Contrastive,
    RecallAt1,
    RecallAt5,
    RecallMetric,
    Siglip,
    Triplet,
    compute_cosines,
    rank_partners,
)
from tests.training.loss_formulas import differentiate

PAIRS, FEATURES = 9, 5
OUTPUTS = np.random.default_rng(3).normal(0, 2, (PAIRS, 2 * FEATURES)).astype(np.float32)
NUMBERS = np.arange(PAIRS, dtype=np.int32)
TEMPERATURE = 0.3
LOSS: Callable[..., jax.Array] = Contrastive(reduction="mean", temperature=TEMPERATURE).build()


def scale(outputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Both embeddings of length 1, and the lengths that they had."""
    parts = outputs.astype(np.float64).reshape(len(outputs), 2, -1)
    lengths = np.linalg.norm(parts, axis=-1, keepdims=True)
    return parts / lengths, lengths


@pytest.mark.medium
def test_loss_is_the_mean_cross_entropy_of_both_directions() -> None:
    unit, _ = scale(OUTPUTS)
    scores = unit[:, 0] @ unit[:, 1].T / TEMPERATURE
    rows, columns = (logsumexp(scores, axis=axis) for axis in (1, 0))
    expected = (rows + columns) / 2 - np.diag(scores)
    np.testing.assert_allclose(LOSS(OUTPUTS, NUMBERS), expected, rtol=1e-5)


@pytest.mark.medium
def test_gradient_is_that_of_the_formula() -> None:
    unit, lengths = scale(OUTPUTS)
    scores = unit[:, 0] @ unit[:, 1].T / TEMPERATURE
    # Of the mean loss by the scores: what both softmaxes give beyond the partner's share.
    by_scores = ((softmax(scores, 1) + softmax(scores, 0)) / 2 - np.eye(PAIRS)) / PAIRS
    by_unit = np.stack([by_scores @ unit[:, 1], by_scores.T @ unit[:, 0]], 1) / TEMPERATURE
    inside = (by_unit * unit).sum(-1, keepdims=True)
    expected = ((by_unit - inside * unit) / lengths).reshape(PAIRS, -1)
    gradient = jax.grad(lambda outputs: LOSS(outputs, NUMBERS).mean())(jnp.asarray(OUTPUTS))
    np.testing.assert_allclose(gradient, expected, rtol=1e-4, atol=1e-7)


@pytest.mark.medium
def test_repeated_pairs_are_not_compared() -> None:
    """As in the last batch of an evaluation, which repeats a pair as padding."""
    rows = np.r_[NUMBERS, 0, 0]
    padded = LOSS(OUTPUTS[rows], NUMBERS[rows])
    np.testing.assert_allclose(padded, LOSS(OUTPUTS, NUMBERS)[rows], rtol=1e-6)


@pytest.mark.medium
def test_embedding_of_zeros_has_finite_loss_and_gradient() -> None:
    outputs = jnp.asarray(OUTPUTS).at[0].set(0)
    loss, gradient = jax.value_and_grad(lambda outputs: LOSS(outputs, NUMBERS).mean())(outputs)
    assert np.isfinite(loss)
    assert np.isfinite(gradient).all()


def expect_siglip(outputs: np.ndarray, temperature: float, bias: float) -> np.ndarray:
    """The loss of each pair, as the paper's pseudocode sums it (Zhai et al. 2023, algorithm 1)."""
    unit, _ = scale(outputs)
    losses = np.zeros(len(outputs))
    for row, column in np.ndindex(len(outputs), len(outputs)):
        sign = 1 if row == column else -1
        logit = unit[row, 0] @ unit[column, 1] / temperature + bias
        losses[row] += math.log1p(math.exp(-sign * logit))
    return losses


def expect_triplet(outputs: np.ndarray, margin: float) -> np.ndarray:
    """The loss of each pair: both embeddings are anchors."""
    unit, _ = scale(outputs)
    losses = np.zeros(len(outputs))
    for pair in range(len(outputs)):
        others = [other for other in range(len(outputs)) if other != pair]
        for side in (0, 1):
            anchor = unit[pair, side]
            hardest = max(anchor @ unit[other, 1 - side] for other in others)
            losses[pair] += max(0, margin + hardest - anchor @ unit[pair, 1 - side]) / 2
    return losses


SIGLIP = Siglip(reduction="mean", temperature=0.4, bias=-1.5).build()
TRIPLET = Triplet(reduction="mean", margin=0.6).build()
FORMULAS = [
    (SIGLIP, lambda outputs: expect_siglip(outputs, 0.4, -1.5)),
    (TRIPLET, lambda outputs: expect_triplet(outputs, 0.6)),
]


@pytest.mark.medium
@pytest.mark.parametrize(("loss", "formula"), FORMULAS, ids=["siglip", "triplet"])
def test_other_losses_of_pairs_have_the_value_and_gradient_of_their_formulas(
    loss: Callable[..., jax.Array], formula: Callable[[np.ndarray], np.ndarray]
) -> None:
    expected = formula(OUTPUTS)
    assert (expected > 0).sum() > PAIRS / 2
    np.testing.assert_allclose(loss(OUTPUTS, NUMBERS), expected, rtol=1e-5, atol=1e-6)
    gradient = jax.grad(lambda outputs: loss(outputs, NUMBERS).sum())(jnp.asarray(OUTPUTS))
    by_differences = differentiate(lambda outputs: float(formula(outputs).sum()), OUTPUTS)
    np.testing.assert_allclose(gradient, by_differences, rtol=1e-3, atol=1e-5)


@pytest.mark.medium
@pytest.mark.parametrize(("loss", "formula"), FORMULAS, ids=["siglip", "triplet"])
def test_other_losses_do_not_compare_repeated_pairs(
    loss: Callable[..., jax.Array], formula: Callable[[np.ndarray], np.ndarray]
) -> None:
    """The losses of all pairs are the same beside copies of one, and for the copies."""
    rows = np.r_[NUMBERS, 0, 0]
    padded = loss(OUTPUTS[rows], NUMBERS[rows])
    np.testing.assert_allclose(padded, formula(OUTPUTS)[rows], rtol=1e-5, atol=1e-6)


@pytest.mark.medium
@pytest.mark.parametrize("loss", [SIGLIP, TRIPLET], ids=["siglip", "triplet"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_other_losses_are_finite_for_zeros_and_for_one_pair(
    loss: Callable[..., jax.Array], dtype: str
) -> None:
    for outputs in (jnp.asarray(OUTPUTS, dtype).at[0].set(0), jnp.asarray(OUTPUTS[:1], dtype)):
        losses = loss(outputs, NUMBERS[: len(outputs)])
        gradient = jax.grad(lambda outputs: loss(outputs, NUMBERS[: len(outputs)]).sum())(outputs)
        assert losses.dtype == jnp.float32
        assert np.isfinite(losses).all()
        assert np.isfinite(np.asarray(gradient, np.float32)).all()


def recall(metric: RecallMetric, outputs: np.ndarray, batch: int) -> float:
    """The metric over batches of this size; the last one is padded with the first pair."""
    fitted = metric.fit_to_samples([NUMBERS], (outputs.shape[1],))
    total = fitted.zero(0)
    for start in range(0, len(outputs), batch):
        rows = np.arange(start, start + batch)
        mask = rows < len(outputs)
        rows = np.where(mask, rows, 0)
        sums = fitted.sums(
            jnp.asarray(outputs[rows]), jnp.asarray(NUMBERS[rows]), jnp.asarray(mask)
        )
        total = jax.tree.map(lambda a, b: a + np.asarray(b), total, sums)
    return fitted.value(total)


@pytest.mark.medium
@pytest.mark.parametrize("batch", [2, 4, 9, 16])
def test_recall_is_of_the_whole_split_whatever_the_batches(
    batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(contrastive, "RANKED_ROWS", 4)
    unit, _ = scale(OUTPUTS)
    order = np.argsort(-(unit[:, 0] @ unit[:, 1].T), axis=1)
    ranks = 1 + np.argmax(order == NUMBERS[:, None], axis=1)
    assert 0 < (ranks == 1).sum() < (ranks <= 5).sum() < PAIRS
    assert recall(RecallAt1(), OUTPUTS, batch) == pytest.approx((ranks == 1).mean())
    assert recall(RecallAt5(), OUTPUTS, batch) == pytest.approx((ranks <= 5).mean())


def test_equal_embeddings_find_one_of_all() -> None:
    """A network that collapsed isn't praised: of equal ones the earlier pair ranks first."""
    ranks, nearest = rank_partners(np.ones((PAIRS, 6)))
    assert ranks.tolist() == list(range(1, PAIRS + 1))
    assert nearest.tolist() == [0] * PAIRS


def test_diverged_network_finds_nothing() -> None:
    ranks, _ = rank_partners(np.full((PAIRS, 6), np.nan))
    assert ranks.tolist() == [PAIRS] * PAIRS


def test_cosines_are_of_each_pair() -> None:
    unit, _ = scale(OUTPUTS)
    np.testing.assert_allclose(compute_cosines(OUTPUTS), (unit[:, 0] * unit[:, 1]).sum(-1))
    assert compute_cosines(np.zeros((1, 4))).tolist() == [0.0]


def test_recall_of_classes_is_refused() -> None:
    with pytest.raises(ValueError, match="needs pairs to match, whose labels are their numbers"):
        RecallAt1().sums(jnp.zeros((2, 4)), jnp.zeros((2, 4)), jnp.ones(2, bool))
