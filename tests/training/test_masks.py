"""Selections whose size depends on values, under jit, against loops in numpy (M-13)."""

from __future__ import annotations

import math
from fractions import Fraction

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.training.masks import (
    Masked,
    choose,
    make_length_mask,
    masked_mean,
    masked_sum,
    mean_of_hardest,
    top_share_mask,
)

# One shape, so that everything is compiled once. Few distinct values: ties are common.
LOSSES = st.lists(st.sampled_from([0.0, 0.5, 1.0, 2.0, 7.25]), min_size=9, max_size=9)
COUNTS = st.lists(st.booleans(), min_size=9, max_size=9)
compiled_hardest = jax.jit(top_share_mask, static_argnums=1)


def reference_hardest(losses: list[float], share: str, counts: list[bool]) -> list[bool]:
    """The largest one after the other, the first of equals first."""
    left = [index for index, counted in enumerate(counts) if counted]
    wanted = max(1, math.floor(Fraction(share) * len(left))) if left else 0
    chosen: set[int] = set()
    for _ in range(wanted):
        best = left[0]
        for index in left:
            if losses[index] > losses[best]:
                best = index
        chosen.add(best)
        left.remove(best)
    return [index in chosen for index in range(len(losses))]


@pytest.mark.slow
@settings(max_examples=60, deadline=None)
@given(LOSSES, COUNTS, st.sampled_from(["0.7", "0.29", "1.0", "0.01", "0.5"]))
def test_hardest_mask_matches_a_loop(losses: list[float], counts: list[bool], share: str) -> None:
    result = compiled_hardest(jnp.array(losses), float(share), jnp.array(counts))
    assert result.tolist() == reference_hardest(losses, share, counts)


@pytest.mark.slow
@pytest.mark.parametrize(("share", "wanted"), [(0.29, 29), (0.7, 70), (0.57, 57), (1e-9, 1)])
def test_share_is_rounded_as_its_decimal(share: float, wanted: int) -> None:
    """0.29 * 100 and 0.57 * 100 are below 29 and 57 in float64."""
    assert int(top_share_mask(jnp.arange(100.0), share).sum()) == wanted


@pytest.mark.slow
def test_hardest_mask_has_the_shape_of_the_losses() -> None:
    losses = jnp.array([[3.0, 1.0, 2.0], [0.0, 5.0, 4.0]])
    assert top_share_mask(losses, 0.5).tolist() == [[True, False, False], [False, True, True]]


@pytest.mark.slow
def test_valid_mask_can_broadcast() -> None:
    losses = jnp.array([[3.0, 1.0, 2.0, 4.0], [0.0, 9.0, 8.0, 7.0]])
    result = top_share_mask(losses, 0.5, jnp.array([[True], [False]]))
    assert result.tolist() == [[True, False, False, True], [False] * 4]


@pytest.mark.slow
def test_valid_loss_of_minus_infinity_ranks_before_invalid_ones() -> None:
    result = top_share_mask(
        jnp.array([0.0, -jnp.inf, -jnp.inf]), 1.0, jnp.array([False, False, True])
    )
    assert result.tolist() == [False, False, True]


@pytest.mark.slow
def test_nan_loss_is_the_hardest() -> None:
    """So that the step that it comes from is seen not to be finite."""
    losses = jnp.array([1.0, jnp.nan, 9.0])
    assert top_share_mask(losses, 0.4).tolist() == [False, True, False]
    assert jnp.isnan(mean_of_hardest(losses, 0.7))


@pytest.mark.parametrize("share", [0.0, 1.5, -0.1])
def test_share_out_of_range_is_refused(share: float) -> None:
    with pytest.raises(ValueError, match=r"a share of .*: must be above 0 and at most 1"):
        top_share_mask(jnp.ones(3), share)


@pytest.mark.slow
def test_gradient_reaches_only_the_hardest() -> None:
    losses, counts = jnp.array([1.0, 4.0, 3.0, 2.0, 9.0]), jnp.array([1, 1, 1, 1, 0], bool)
    gradient = jax.jit(jax.grad(lambda x: mean_of_hardest(x * x, 0.5, counts)))(losses)
    np.testing.assert_allclose(gradient, [0, 4, 3, 0, 0])


@pytest.mark.slow
@settings(max_examples=30, deadline=None)
@given(LOSSES, COUNTS)
def test_masked_sums_and_means_use_only_valid_values(
    losses: list[float], counts: list[bool]
) -> None:
    values, where = np.array(losses, np.float32).reshape(3, 3), np.array(counts).reshape(3, 3)
    total, mean = masked_sum(jnp.asarray(values), where), masked_mean(jnp.asarray(values), where)
    left = values[where]
    np.testing.assert_allclose(total, left.sum(), rtol=1e-6)
    np.testing.assert_allclose(mean, left.mean() if left.size else 0, rtol=1e-6)
    rows = [row[kept].mean() if kept.any() else 0 for row, kept in zip(values, where, strict=True)]
    np.testing.assert_allclose(masked_mean(jnp.asarray(values), where, 1), rows, rtol=1e-6)


@pytest.mark.slow
def test_masked_values_can_be_non_finite() -> None:
    """A product with the mask would give NaN, as value and as gradient."""
    values = jnp.array([4.0, jnp.inf, jnp.nan])
    where = jnp.array([True, False, False])
    value, gradient = jax.value_and_grad(lambda x: Masked(x, where).map(jnp.sqrt).mean())(values)
    assert (float(value), gradient.tolist()) == (2.0, [0.25, 0.0, 0.0])


def test_mask_is_true_below_each_length() -> None:
    result = jax.jit(make_length_mask, static_argnums=1)(jnp.array([[0, 2], [3, 9]]), 3)
    assert result.astype(int).tolist() == [[[0, 0, 0], [1, 1, 0]], [[1, 1, 1], [1, 1, 1]]]


@pytest.mark.slow
def test_mask_is_carried_through_jit() -> None:
    """x = x[x > 0]; x = log(x)[-2 < log(x)]; the mean of the largest half, in static shapes."""

    @jax.jit
    def compute(x: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        positive = Masked(x, jnp.ones(x.shape, bool)).select(x > 0)
        logs = positive.map(jnp.log)
        kept = logs.select(logs.values > -2)
        return kept.count, kept.sum(), kept.hardest(0.5).mean()

    x = np.random.default_rng(0).standard_normal(40).astype(np.float32)
    logs = np.log(x[x > 0])
    logs = logs[logs > -2]
    count, total, mean = compute(x)
    assert int(count) == len(logs)
    np.testing.assert_allclose(total, logs.sum(), rtol=1e-5)
    np.testing.assert_allclose(mean, np.sort(logs)[::-1][: len(logs) // 2].mean(), rtol=1e-5)


def test_choose_selects_between_masked_values() -> None:
    """One returns the positives, the other the first two."""
    x = jnp.array([-1.0, 2.0, -3.0, 4.0])

    @jax.jit
    def branch(condition: jax.Array) -> Masked:
        every = Masked(x, jnp.ones(4, bool))
        return choose(condition, every.select(x > 0), every.select(jnp.arange(4) < 2))

    for condition, expected in ((True, [2.0, 4.0]), (False, [-1.0, 2.0])):
        chosen = branch(jnp.array(condition))
        assert np.asarray(chosen.values)[np.asarray(chosen.where)].tolist() == expected
