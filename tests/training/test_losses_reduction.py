"""The samples and labels that the loss of a step is over: all, the hardest share, the valid."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from flax import linen as nn

from pipeline.data.batch import Batch
from pipeline.training.losses import compute_divisor, reduce_losses
from pipeline.training.metrics import summarize
from pipeline.training.parallel.parallel_spec import Shards
from tests.training.test_step import (
    CLASSES,
    RATES,
    by_hand,
    flat,
    make_batch,
    make_config,
    make_step,
    start,
)

SAMPLES = 8


class FourPlaces(nn.Module):
    """Classes of each of the four pixels of a sample."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        places = images.reshape(images.shape[0], 4, 1)
        return nn.Dense(CLASSES)(nn.tanh(nn.Dense(5)(places)))


class OfLogarithms(nn.Module):
    """Black images have logits that are not finite."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(CLASSES)(jnp.log(images.reshape(images.shape[0], -1)))


def losses_by_hand(params: object, batch: Batch) -> np.ndarray:
    """The loss of each sample, float64."""
    ones = [rows(batch, [number]) for number in range(SAMPLES)]
    return np.array([by_hand(params, one, 1)[0] for one in ones])


def rows(batch: Batch, numbers: list[int]) -> Batch:
    """Some samples of a batch, as a batch of its own."""
    columns = {name: column[numbers] for name, column in batch.columns.items()}
    return replace(batch, columns=columns, sample=batch.sample[numbers])


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_step_learns_from_the_hardest_share(reduction: str) -> None:
    """Loss and gradient are those of the 5 = floor(0.7 * 8) hardest samples on paper."""
    step = make_step(hardest_share=0.7, reduction=reduction)
    state, batch = start(step), make_batch(samples=SAMPLES)
    losses = losses_by_hand(state.params, batch)
    chosen = sorted(np.argsort(-losses)[:5].tolist())
    loss, gradients = by_hand(state.params, rows(batch, chosen), 5)
    times = 1 if reduction == "mean" else 5
    after, record = step.step(state, batch, RATES)
    assert float(record.loss) == pytest.approx(times * loss, rel=1e-5)
    shifted = (flat(state.params) - flat(after.params)) / RATES[0]
    np.testing.assert_allclose(shifted, times * flat(gradients), rtol=1e-4, atol=1e-6)


@pytest.mark.medium
def test_hardest_share_excludes_padding() -> None:
    """6 valid samples of 8: 4 = floor(0.7 * 6) of them."""
    step = make_step(hardest_share=0.7)
    state, batch = start(step), make_batch(samples=SAMPLES, count=np.int32(6))
    losses = losses_by_hand(state.params, batch)[:6]
    _, record = step.step(state, batch, RATES)
    assert float(record.loss) == pytest.approx(np.sort(losses)[-4:].mean(), rel=1e-5)


@pytest.mark.slow
def test_ignored_labels_do_not_change_a_step() -> None:
    """Class 1 is ignored: loss, update and evaluation are those of the other samples alone."""
    batch = make_batch(samples=SAMPLES)
    kept = np.flatnonzero(batch.columns["label"] != 1).tolist()
    assert 0 < len(kept) < SAMPLES
    step, without = make_step(ignore_index=1), rows(batch, kept)
    without = replace(without, count=np.int32(len(kept)))
    state = start(step)
    after, record = step.step(state, batch, RATES)
    alone, expected = step.step(state, without, RATES)
    np.testing.assert_allclose(record[:5], expected[:5], rtol=1e-5)
    np.testing.assert_allclose(flat(after.params), flat(alone.params), rtol=1e-5, atol=1e-7)
    result, right = (
        summarize(step.evaluate(state, given, step.zero_sums()), "abc")
        for given in (batch, without)
    )
    assert result.pop("loss") == pytest.approx(right.pop("loss"), rel=1e-6)
    assert result == right
    assert result["count"] == len(kept)


def places(seed: int) -> Batch:
    """Labels at four places, some samples with many of them ignored, some with none."""
    rng, batch = np.random.default_rng(seed), make_batch(samples=SAMPLES)
    labels = rng.integers(0, CLASSES, (SAMPLES, 4)).astype(np.int32)
    out = rng.random((SAMPLES, 4)) < np.linspace(0, 1, SAMPLES)[:, None]
    return replace(batch, columns={**batch.columns, "label": np.where(out, -100, labels)})


@pytest.mark.slow
def test_valid_labels_have_equal_weight_in_microbatches() -> None:
    """Microbatches differ in numbers of labels; their sum is the gradient of the batch."""
    whole, split = (
        make_step(network=FourPlaces(), ignore_index=-100, accumulate=microbatches)
        for microbatches in (1, 4)
    )
    state, batch = start(whole), places(1)
    (after, record), (after_split, record_split) = (
        s.step(state, batch, RATES) for s in (whole, split)
    )
    np.testing.assert_allclose(record_split[:5], record[:5], rtol=1e-5)
    np.testing.assert_allclose(flat(after_split.params), flat(after.params), rtol=1e-5, atol=1e-7)
    parts = make_config(network=FourPlaces(), ignore_index=-100)
    images = jnp.asarray(batch.columns["image"]) / 255.0
    logits = parts.network.apply({"params": state.params}, images, train=True)
    log_p, labels = jax.nn.log_softmax(logits), batch.columns["label"]
    each = [-log_p[b, p, labels[b, p]] for b, p in np.argwhere(labels != -100)]
    assert float(record.loss) == pytest.approx(np.mean(each), rel=1e-5)
    evaluation = summarize(whole.evaluate(state, batch, whole.zero_sums()), "abc")
    assert evaluation["count"] == len(each)
    assert evaluation["loss"] == pytest.approx(np.mean(each), rel=1e-5)


@pytest.mark.medium
def test_batch_without_labels_has_zero_loss_and_gradient() -> None:
    step = make_step(network=FourPlaces(), ignore_index=-100)
    batch = places(0)
    batch.columns["label"][:] = -100  # type: ignore[index]
    state = start(step)
    after, record = step.step(state, batch, RATES)
    assert (float(record.loss), float(record.grad_norm)) == (0, 0)
    np.testing.assert_array_equal(flat(after.params), flat(state.params))


@pytest.mark.slow
def test_logits_of_ignored_labels_can_be_non_finite() -> None:
    """Infinite ones would make the gradient of everything NaN."""
    parts = make_config(ignore_index=-100)
    logits = jnp.array([[1.0, 2.0, 3.0], [jnp.inf, -jnp.inf, jnp.nan]])
    labels = jnp.array([0, -100])
    gradient = jax.grad(lambda x: parts.objective.loss(x, labels, labels != -100).sum())(logits)
    assert np.isfinite(gradient).all()
    assert not gradient[1].any()


@pytest.mark.slow
@pytest.mark.parametrize("ignore_index", [None, 1])
def test_evaluation_padding_can_have_non_finite_logits(ignore_index: int | None) -> None:
    step = make_step(network=OfLogarithms(), ignore_index=ignore_index)
    batch, state = make_batch(samples=SAMPLES, count=np.int32(6)), start(step)
    images = np.maximum(batch.columns["image"], 1)
    alone = replace(batch, columns={**batch.columns, "image": images})
    images = images.copy()
    images[6:] = 0
    spoilt = replace(batch, columns={**batch.columns, "image": images})
    logits = OfLogarithms().apply({"params": state.params}, jnp.asarray(images, float), train=False)
    assert not np.isfinite(logits[6:]).any()
    result, right = (step.evaluate(state, given, step.zero_sums()) for given in (spoilt, alone))
    assert np.isfinite(float(result.loss_sum))
    jax.tree.map(np.testing.assert_array_equal, result, right)


@pytest.mark.slow
@pytest.mark.parametrize(("reduction", "expected"), [("mean", 2.5), ("sum", 5.0)])
@pytest.mark.parametrize("share", [1.0, 0.99], ids=["all", "hardest"])
def test_losses_of_padding_and_ignored_labels_can_be_non_finite(
    reduction: str, expected: float, share: float
) -> None:
    """Padding, and a sample without labels, of which a loss of another distribution is 0 / 0."""
    parts = make_config(ignore_index=-100, reduction=reduction, hardest_share=share)
    labels = jnp.array([0, -100, 2, 1])
    valid = jnp.array([True, True, True, False])
    losses = jnp.array([2.0, jnp.nan, 3.0, jnp.inf])
    if share < 1:
        expected = 3.0
    loss = reduce_losses(parts, losses, labels, valid, compute_divisor(parts, labels, valid, 3))
    assert float(loss.minimised) == pytest.approx(expected)


@pytest.mark.slow
@pytest.mark.parametrize("changed", [{}, {"hardest_share": 0.7}, {"ignore_index": 1}], ids=str)
def test_reduction_none_trains_the_sum_and_reports_the_mean(
    changed: dict[str, object],
) -> None:
    """L-01. Of 6 valid samples; one with an ignored label is an entry of 0, as in MindSpore."""
    batch = make_batch(samples=SAMPLES, count=np.int32(6))
    steps = {name: make_step(reduction=name, **changed) for name in ("none", "sum")}
    state = start(steps["none"])
    after, record = steps["none"].step(state, batch, RATES)
    of_sum, of_sum_record = steps["sum"].step(state, batch, RATES)
    np.testing.assert_array_equal(flat(after.params), flat(of_sum.params))
    assert float(record.grad_norm) == float(of_sum_record.grad_norm)
    losses = losses_by_hand(state.params, batch)[:6]
    if "hardest_share" in changed:
        losses = np.sort(losses)[-4:]
    if "ignore_index" in changed:
        losses = np.where(batch.columns["label"][:6] == 1, 0, losses)
    assert float(record.loss) == pytest.approx(losses.mean(), rel=1e-5)
    assert float(of_sum_record.loss) == pytest.approx(losses.sum(), rel=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize("ignore_index", [None, 1])
def test_reduction_none_adds_up_over_parts_of_a_batch(ignore_index: int | None) -> None:
    """Microbatches, and shards one after the other."""
    options = {"reduction": "none", "ignore_index": ignore_index}
    whole = make_step(**options)
    state, batch = start(whole), make_batch(samples=SAMPLES)
    after, record = whole.step(state, batch, RATES)
    shards = Shards(count=4)
    for changed in ({"accumulate": 4}, {"shards": shards}):
        split, split_record = make_step(**options, **changed).step(state, batch, RATES)
        np.testing.assert_allclose(split_record[:5], record[:5], rtol=1e-5)
        np.testing.assert_allclose(flat(split.params), flat(after.params), rtol=1e-5, atol=1e-7)
