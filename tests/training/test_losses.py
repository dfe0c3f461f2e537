"""Losses against float64 loops and hand-worked numbers (L-01, L-02)."""

import math
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from omegaconf import OmegaConf
from pydantic import ValidationError

from pipeline.core.registry import list_components
from pipeline.data.columns import Targets
from pipeline.training.losses import L1, CrossEntropy, Mse
from tests.training.loss_formulas import assert_agrees

CONF = Path(__file__).parents[2] / "conf" / "loss"
EIGHTHS = jnp.log(jnp.array([[1.0, 2.0, 5.0]]))  # softmax 1/8, 2/8, 5/8


def cross_entropy(smoothing=0.0, convention="mindspore"):
    return CrossEntropy(
        reduction="mean", smoothing=smoothing, smoothing_convention=convention
    ).build()


def reference_cross_entropy(logits, label, smoothing, convention):
    """One sample, in float64."""
    classes = len(logits)
    log_total = max(logits) + math.log(sum(math.exp(x - max(logits)) for x in logits))
    total = 0.0
    for index, logit in enumerate(logits):
        if convention == "mindspore":
            target = 1 - smoothing if index == label else smoothing / (classes - 1)
        else:
            target = (1 - smoothing) * (index == label) + smoothing / classes
        total += target * (log_total - logit)
    return total


@pytest.mark.parametrize("name", sorted(file.stem for file in CONF.glob("*.yaml")))
def test_conf_has_every_key_of_the_spec(name):
    spec = list_components("loss")[name]
    written = OmegaConf.to_container(OmegaConf.load(CONF / f"{name}.yaml"))
    assert spec.model_validate(written).model_dump() == written
    assert (CONF / f"{name}.yaml").read_text().startswith("# @package train.loss\n")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("smoothing", "convention", "expected"),
    [
        (0.0, "mindspore", 0.4700036),
        (0.0, "uniform", 0.4700036),
        (0.1, "mindspore", 0.5962901),  # 0.9 ln(8/5) + 0.05 ln 8 + 0.05 ln 4
        (0.1, "uniform", 0.5541946),  # 0.28/0.3 ln(8/5) + 0.01/0.3 ln 8 + 0.01/0.3 ln 4
    ],
)
def test_cross_entropy_matches_hand_computed_values(smoothing, convention, expected):
    losses = cross_entropy(smoothing, convention)(EIGHTHS, jnp.array([2]))
    np.testing.assert_allclose(losses, [expected], rtol=1e-6)


@pytest.mark.slow
@settings(max_examples=40, deadline=None)
@given(
    st.lists(
        st.lists(st.floats(-30, 30, width=32), min_size=4, max_size=4), min_size=3, max_size=3
    ),
    st.lists(st.integers(0, 3), min_size=3, max_size=3),
    st.floats(0, 0.9),
    st.sampled_from(["mindspore", "uniform"]),
)
def test_cross_entropy_matches_float64_loops(logits, labels, smoothing, convention):
    losses = cross_entropy(smoothing, convention)(jnp.array(logits), jnp.array(labels))
    expected = [
        reference_cross_entropy(row, label, smoothing, convention)
        for row, label in zip(logits, labels, strict=True)
    ]
    np.testing.assert_allclose(losses, expected, rtol=1e-5, atol=1e-5)


@pytest.mark.slow
@pytest.mark.parametrize(("convention", "off"), [("mindspore", 0.2 / 3), ("uniform", 0.2 / 4)])
def test_smoothed_targets_follow_their_convention(convention, off):
    """The gradient is softmax - target, and the softmax of equal logits is 1/4."""
    loss = cross_entropy(0.2, convention)
    gradient = jax.grad(lambda logits: loss(logits, jnp.array([1])).sum())(jnp.zeros((1, 4)))
    np.testing.assert_allclose(0.25 - gradient, [[off, 1 - 3 * off, off, off]], rtol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("convention", ["mindspore", "uniform"])
def test_one_hot_labels_count_as_their_class(smoothing, convention):
    loss = cross_entropy(smoothing, convention)
    logits = jnp.array([[0.5, -1.0, 2.0], [0.0, 3.0, 1.0]])
    np.testing.assert_array_equal(
        loss(logits, jnp.array([2, 0])), loss(logits, jnp.array([[0.0, 0, 1], [1, 0, 0]]))
    )


@pytest.mark.medium
def test_soft_labels_weight_the_classes():
    losses = cross_entropy()(EIGHTHS, jnp.array([[0.0, 0.5, 0.5]]))
    np.testing.assert_allclose(losses, [(math.log(4) + math.log(1.6)) / 2], rtol=1e-6)


@pytest.mark.slow
def test_cross_entropy_of_large_logits_is_finite():
    losses = cross_entropy()(jnp.array([[1e4, 0.0]]), jnp.array([1]))
    np.testing.assert_array_equal(losses, [1e4])


@pytest.mark.slow
@pytest.mark.parametrize("spec", [L1(reduction="mean"), Mse(reduction="sum")])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
def test_losses_are_float32_per_sample_for_any_logits(spec, dtype):
    logits = jnp.ones((5, 3), dtype)
    for loss in (spec.build(), cross_entropy()):
        losses = loss(logits, jnp.zeros(5, jnp.int32))
        assert losses.shape == (5,)
        assert losses.dtype == jnp.float32


@pytest.mark.slow
def test_half_precision_logits_are_summed_in_float32():
    """Log of 300 equal terms: bfloat16 sums stall at 256."""
    losses = cross_entropy()(jnp.zeros((1, 300), jnp.bfloat16), jnp.array([0]))
    np.testing.assert_allclose(losses, [math.log(300)], rtol=1e-6)


@pytest.mark.slow
def test_byte_labels_with_more_than_256_classes():
    logits = jnp.zeros((1, 300)).at[0, 40].set(5.0)
    np.testing.assert_array_equal(
        cross_entropy()(logits, jnp.array([40], jnp.uint8)),
        cross_entropy()(logits, jnp.array([40])),
    )


@pytest.mark.slow
def test_l1_and_mse_match_hand_computed_values():
    outputs = jnp.array([[1.0, -1.0, 0.5, 0.0]])
    np.testing.assert_allclose(L1(reduction="mean").build()(outputs, jnp.array([0])), [1.5 / 4])
    np.testing.assert_allclose(Mse(reduction="mean").build()(outputs, jnp.array([0])), [1.25 / 4])
    targets = jnp.array([[3.0, 0.0, 0.5, -1.0]])
    np.testing.assert_allclose(L1(reduction="mean").build()(outputs, targets), [4 / 4])
    np.testing.assert_allclose(Mse(reduction="mean").build()(outputs, targets), [6 / 4])


@pytest.mark.slow
@pytest.mark.parametrize("labels", [np.zeros(3, np.int32), np.zeros((2, 3), np.int32)])
@pytest.mark.parametrize("loss", [cross_entropy(), L1(reduction="mean").build()])
def test_unsuitable_labels_are_refused(labels, loss):
    with pytest.raises(
        ValueError, match=r"do not fit logits of shape \(2, 3\); must be integers of"
    ):
        loss(jnp.zeros((2, 3)), jnp.asarray(labels))


def test_mindspore_smoothing_of_one_class_is_refused():
    with pytest.raises(ValueError, match=r"smoothing = 0\.1: needs at least 2 classes, not 1"):
        cross_entropy(0.1)(jnp.zeros((2, 1)), jnp.zeros(2, jnp.int32))


def test_smoothing_of_one_is_refused():
    with pytest.raises(ValidationError, match="smoothing"):
        cross_entropy(1.0)


def softmax(logits):
    weights = np.exp(logits)
    return weights / weights.sum(-1, keepdims=True)


@pytest.mark.slow
def test_loss_of_many_labels_is_their_mean():
    generator = np.random.default_rng(0)
    logits = generator.normal(size=(2, 3, 5, 4)).astype(np.float32)
    labels = generator.integers(0, 4, (2, 3, 5))
    each = -np.log(np.take_along_axis(softmax(logits), labels[..., None], -1))
    losses = cross_entropy()(logits, labels)
    np.testing.assert_allclose(losses, each.reshape(2, 15).mean(1), rtol=1e-5)
    targets = np.eye(4, dtype=np.float32)[labels]
    np.testing.assert_array_equal(cross_entropy()(logits, targets), losses)


@pytest.mark.parametrize(("loss", "power"), [(L1, 1), (Mse, 2)])
def test_errors_at_many_positions_are_averaged(loss, power):
    generator = np.random.default_rng(0)
    outputs, targets = generator.normal(size=(2, 2, 3, 4)).astype(np.float32)
    expected = (np.abs(outputs - targets) ** power).reshape(2, 12).mean(1)
    losses = loss(reduction="mean").build()(outputs, targets)
    np.testing.assert_allclose(losses, expected, rtol=1e-5)


def test_labels_of_other_positions_are_refused():
    message = (
        r"\(2, 5\) .*do not fit logits of shape \(2, 4, 3\); must be integers of shape \(2, 4\)"
    )
    with pytest.raises(ValueError, match=message):
        cross_entropy()(jnp.zeros((2, 4, 3)), jnp.zeros((2, 5), jnp.int32))


def weighted(weights, smoothing=0.0):
    return CrossEntropy(
        reduction="mean",
        smoothing=smoothing,
        smoothing_convention="mindspore",
        class_weights=weights,
    )


TARGETS = Targets(("ant", "bee", "owl"), counts=(2, 6, 4))


@pytest.mark.medium
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
def test_class_weight_multiplies_the_loss_of_its_labels(smoothing):
    """D-19."""
    logits, labels = np.random.default_rng(1).standard_normal((5, 3)), [0, 1, 2, 1, 0]
    loss = weighted((2.0, 0.5, 3.0), smoothing).fit_to_targets(TARGETS).build()
    found = loss(jnp.asarray(logits, jnp.float32), jnp.asarray(labels))
    for row, (own, label) in enumerate(zip(logits, labels, strict=True)):
        plain = reference_cross_entropy(list(own), label, smoothing, "mindspore")
        assert float(found[row]) == pytest.approx((2.0, 0.5, 3.0)[label] * plain, rel=1e-5)


def test_balanced_weights_equalise_the_classes():
    fitted = weighted("balanced").fit_to_targets(TARGETS)
    assert fitted.class_weights == pytest.approx((12 / 6, 12 / 18, 12 / 12))
    each = np.array(TARGETS.counts) * fitted.class_weights
    assert each.tolist() == pytest.approx([4, 4, 4])


@pytest.mark.medium
def test_class_weights_skip_ignored_pixels():
    logits = np.random.default_rng(1).standard_normal((1, 2, 2, 3)).astype(np.float32)
    labels = np.array([[[0, 255], [2, 1]]], np.uint8)
    loss = weighted((2.0, 0.5, 3.0)).build()
    found = loss(jnp.asarray(logits), jnp.asarray(labels), jnp.asarray(labels != 255))
    terms = [
        w * reference_cross_entropy(list(logits[0, r, c]), labels[0, r, c], 0.0, "mindspore")
        for (r, c), w in (((0, 0), 2.0), ((1, 0), 3.0), ((1, 1), 0.5))
    ]
    assert float(found[0]) == pytest.approx(np.mean(terms), rel=1e-5)


@pytest.mark.parametrize(
    ("weights", "targets", "message"),
    [
        ((1.0, 2.0), TARGETS, "class_weights has 2 values for 3 classes"),
        ("balanced", Targets(("a", "b"), counts=(3, 0)), "balanced: b has no training label"),
        ("balanced", Targets(("a", "b")), "balanced: what is predicted has no training label"),
    ],
)
def test_unsuitable_class_weights_are_refused(weights, targets, message):
    with pytest.raises(ValueError, match=message):
        weighted(weights).fit_to_targets(targets)


@pytest.mark.parametrize("weights", [(), (1.0, 0.0), "even", (1.0, -2.0)])
def test_invalid_class_weights_are_refused(weights):
    with pytest.raises(
        ValidationError, match="must be balanced, one number above 0 for each class"
    ):
        weighted(weights)


@pytest.mark.medium
@pytest.mark.parametrize("weights", [None, (2.0, 0.5, 3.0)])
def test_z_loss_adds_the_squared_log_of_the_sum_of_exponentials(weights):
    logits = np.random.default_rng(1).normal(1, 2, (4, 3, 3)).astype(np.float32)
    labels = np.random.default_rng(2).integers(0, 3, (4, 3))
    keys = {"reduction": "mean", "smoothing": 0.1, "smoothing_convention": "uniform"}

    def expect(logits, labels):
        terms = []
        for row, label in zip(logits, labels, strict=True):
            weight = weights[label] if weights else 1
            log_total = math.log(np.exp(row).sum())
            plain = reference_cross_entropy(list(row), label, 0.1, "uniform")
            terms.append(weight * plain + 0.03 * log_total**2)
        return float(np.mean(terms)) if terms else 0.0

    loss = CrossEntropy(**keys, class_weights=weights, z_loss=0.03).build()
    assert_agrees(loss, expect, logits, labels)
    where = np.random.default_rng(3).random((4, 3)) < 0.6
    where[0] = False
    assert_agrees(loss, expect, logits, labels, where)


def test_z_loss_leaves_out_labels_without_a_class():
    logits = jnp.asarray(np.random.default_rng(5).standard_normal((3, 4)), jnp.float32)
    keys = {"reduction": "mean", "smoothing": 0.0, "smoothing_convention": "uniform"}
    losses = CrossEntropy(**keys, z_loss=0.5).build()(logits, jnp.array([1, 4, -1]))
    assert losses[0] > 0
    assert losses[1:].tolist() == [0, 0]


def test_negative_z_loss_is_refused():
    with pytest.raises(ValidationError, match="z_loss"):
        CrossEntropy(reduction="mean", smoothing=0.0, smoothing_convention="uniform", z_loss=-1e-4)


@pytest.mark.medium
@pytest.mark.parametrize("convention", ["mindspore", "uniform"])
def test_mixed_labels_are_smoothed_as_their_parts(convention):
    """Labels mixed by lambda have the mixture of the smoothed losses of both classes."""
    logits = np.random.default_rng(1).normal(0, 2, (6, 4)).astype(np.float32)
    first, second = np.random.default_rng(2).integers(0, 4, (2, 6))
    share = 0.3
    mixed = (share * np.eye(4)[first] + (1 - share) * np.eye(4)[second]).astype(np.float32)
    losses = cross_entropy(0.2, convention)(jnp.asarray(logits), jnp.asarray(mixed))
    for number, row in enumerate(logits):
        parts = [
            reference_cross_entropy(list(map(float, row)), labels[number], 0.2, convention)
            for labels in (first, second)
        ]
        expected = share * parts[0] + (1 - share) * parts[1]
        assert float(losses[number]) == pytest.approx(expected, rel=1e-5)
