"""Batch ops: images and labels of a batch mixed, on the host and compiled alike (D-15)."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from scipy import stats

from pipeline.data.columns import ColumnSpec
from pipeline.data.ops.together import CutMix, MixUp, draw_partners, list_beta_steps
from pipeline.data.ops.values import OneHot
from pipeline.data.random import seed_words, uniforms
from pipeline.data.transform import apply_ops, compute_column_specs, fit_to_classes

RNG = np.random.default_rng(0)
BATCH = 16
BYTES = RNG.integers(0, 256, (BATCH, 7, 9, 3), dtype=np.uint8)
FLOATS = RNG.standard_normal((BATCH, 7, 9, 3), dtype=np.float32)
LABELS = np.eye(10, dtype=np.float32)[RNG.integers(0, 10, BATCH)]
OPS = [MixUp(alpha=0.4), CutMix(prob=0.7)]
SPECS = {"image": ColumnSpec((7, 9, 3), "uint8"), "label": ColumnSpec((), "int32")}
HOT = OneHot(classes=10)


def drawn(op, batch=BATCH):
    return uniforms(np, seed_words(3), 0, np.arange(batch), 0, op.draws)


@pytest.mark.slow
@pytest.mark.parametrize("images", [BYTES, FLOATS], ids=["uint8", "float32"])
@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_host_and_compiled_device_agree(op, images):
    host = op.map(np, (images, LABELS), drawn(op))
    device = jax.jit(lambda *given: op.map(jnp, given[:2], given[2]))(images, LABELS, drawn(op))
    for ours, theirs in zip(host, device, strict=True):
        assert ours.dtype == theirs.dtype
        tolerance = 0 if ours.dtype == np.uint8 else 1e-6
        np.testing.assert_allclose(theirs, ours, rtol=tolerance, atol=tolerance)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_mixed_labels_are_distributions(op):
    _, labels = op.map(np, (BYTES, LABELS), drawn(op))
    np.testing.assert_allclose(labels.sum(axis=1), 1, atol=1e-6)
    assert (labels >= 0).all()
    assert (labels.max(axis=1) < 1).any()


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_unfitted_mixing_requires_one_hot_labels(op):
    assert compute_column_specs((HOT, op), SPECS)["label"] == ColumnSpec((10,), "float32")
    with pytest.raises(ValueError, match=r"^ops\.0 .*not int32 of shape \(\); list a one_hot bef"):
        compute_column_specs((op,), SPECS)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_integer_labels_are_mixed_as_one_hot(op):
    (fitted,) = fit_to_classes([op], 10)
    assert compute_column_specs([fitted], SPECS) == compute_column_specs((HOT, op), SPECS)
    classes = LABELS.argmax(axis=1).astype(np.int32)
    for mixed, hot in zip(
        fitted.map(np, (BYTES, classes), drawn(op)),
        op.map(np, (BYTES, LABELS), drawn(op)),
        strict=True,
    ):
        np.testing.assert_array_equal(mixed, hot)


@pytest.mark.parametrize("op", OPS, ids=lambda op: op.name)
def test_pixel_labels_and_numbers_are_refused_for_mixing(op):
    (fitted,) = fit_to_classes([op], 10)
    for label in (ColumnSpec((7, 9), "int32"), ColumnSpec((), "float32")):
        with pytest.raises(ValueError, match=r"^ops\.0 "):
            compute_column_specs([fitted], {**SPECS, "label": label})


def test_unknown_label_column_is_refused():
    with pytest.raises(ValueError, match=r"^ops\.0 \(mix_up\): there is no column 'class'"):
        compute_column_specs((MixUp(label="class"),), SPECS)


def test_cut_mix_after_hwc2chw_is_refused():
    chw = {**SPECS, "image": ColumnSpec((3, 7, 9), "uint8", "chw")}
    with pytest.raises(ValueError, match="list it before hwc2chw"):
        compute_column_specs((HOT, CutMix()), chw)


def test_partner_permutations_are_uniform():
    draws = np.random.default_rng(1).random((6000, 3), dtype=np.float32)
    orders = [tuple(draw_partners(np, row)) for row in draws]
    counts = [orders.count(order) for order in sorted(set(orders))]
    assert len(counts) == 6
    assert stats.chisquare(counts).pvalue > 1e-3


@pytest.mark.parametrize("alpha", [0.2, 1.0, 5.0])
def test_lambda_follows_the_beta_distribution(alpha):
    lambdas, places = list_beta_steps(alpha), np.linspace(0.001, 0.999, 99)
    below = (lambdas[:, None] <= places).mean(axis=0)
    np.testing.assert_allclose(below, stats.beta(alpha, alpha).cdf(places), atol=1e-3)
    assert ((lambdas >= 0) & (lambdas <= 1)).all()


def test_mix_up_blends_images_and_labels_with_one_lambda():
    op = MixUp(alpha=1.0)
    images, labels = op.map(np, (FLOATS, LABELS), drawn(op))
    partner = draw_partners(np, drawn(op)[:, 0])
    share = list_beta_steps(1.0)[int(drawn(op)[0, 1] * len(list_beta_steps(1.0)))]
    assert 0.01 < share < 0.99
    for n, other in enumerate(partner):
        expected = share * FLOATS[n] + (1 - share) * FLOATS[other]
        np.testing.assert_allclose(images[n], expected, atol=1e-6)
        expected = share * LABELS[n] + (1 - share) * LABELS[other]
        np.testing.assert_allclose(labels[n], expected, atol=1e-6)


def test_cut_mix_puts_a_box_of_the_partner_in_place():
    op = CutMix()
    images, labels = op.map(np, (FLOATS, LABELS), drawn(op))
    for n, other in enumerate(draw_partners(np, drawn(op)[:, 0])):
        taken = (images[n] == FLOATS[other]).all(axis=-1)
        kept = (images[n] == FLOATS[n]).all(axis=-1)
        assert (taken | kept).all()
        rows, columns = taken.any(axis=1), taken.any(axis=0)
        if other != n:
            np.testing.assert_array_equal(taken, rows[:, None] & columns)
            expected = kept.mean() * LABELS[n] + taken.mean() * LABELS[other]
            np.testing.assert_allclose(labels[n], expected, atol=1e-6)


def test_cut_mix_with_zero_prob_changes_nothing():
    op = CutMix(prob=0.0)
    images, labels = op.map(np, (BYTES, LABELS), drawn(op))
    np.testing.assert_array_equal(images, BYTES)
    np.testing.assert_array_equal(labels, LABELS)


def test_mixing_is_deterministic_and_differs_between_epochs():
    columns = {"image": BYTES, "label": np.arange(BATCH, dtype=np.int32) % 10}
    ops = (HOT, *OPS)

    def output(epoch):
        return apply_ops(np, ops, columns, seed_words(9), epoch, np.arange(BATCH))["image"]

    np.testing.assert_array_equal(output(2), output(2))
    assert (output(2) != output(3)).any()
