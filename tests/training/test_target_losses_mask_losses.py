"""Losses of masks against their definitions in float64."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from pydantic import ValidationError

from pipeline.data.columns import Targets
from pipeline.training.losses import CrossEntropy
from pipeline.training.target_losses import Dice, DiceCrossEntropy, LovaszSoftmax
from tests.training.loss_formulas import assert_agrees, softmax

CLASSES = 3
GENERATOR = np.random.default_rng(8)
LOGITS = GENERATOR.normal(0, 2, (4, 3, 5, CLASSES)).astype(np.float32)
LABELS = GENERATOR.integers(0, CLASSES, (4, 3, 5)).astype(np.int32)
LABELS[0] = np.minimum(LABELS[0], 1)  # A sample without the last class.
WHERE = GENERATOR.random(LABELS.shape) < 0.7
WHERE[3] = False
NO_SMOOTHING = {"reduction": "mean", "smoothing": 0.0, "smoothing_convention": "uniform"}


def expect_dice(
    logits: np.ndarray, labels: np.ndarray, smooth: float, background: bool = True
) -> float:
    shares, labels = softmax(logits).reshape(-1, CLASSES), labels.ravel()
    coefficients = []
    for number in range(0 if background else 1, CLASSES):
        truth = labels == number
        overlap = shares[truth, number].sum()
        coefficients.append(
            (2 * overlap + smooth) / (shares[:, number].sum() + truth.sum() + smooth)
        )
    return 1 - float(np.mean(coefficients))


def expect_lovasz(logits: np.ndarray, labels: np.ndarray) -> float:
    """The Lovász extension by its definition (Berman et al. 2018, eq. 8): with errors in falling
    order, each times the growth of the set function as its position joins the wrong ones."""
    shares, labels = softmax(logits).reshape(-1, CLASSES), labels.ravel()
    losses = []
    for number in sorted(set(labels.tolist())):
        truth = {int(place) for place in np.flatnonzero(labels == number)}
        errors = [
            1 - share if place in truth else share for place, share in enumerate(shares[:, number])
        ]
        wrong: set[int] = set()
        total, before = 0.0, 0.0
        for place in sorted(range(len(errors)), key=lambda place: -errors[place]):
            wrong.add(place)
            after = len(wrong) / len(truth | wrong)
            total += errors[place] * (after - before)
            before = after
        losses.append(total)
    return float(np.mean(losses)) if losses else 0.0


@pytest.mark.medium
@pytest.mark.parametrize("background", [True, False])
@pytest.mark.parametrize("smooth", [1e-3, 1.0])
def test_dice_has_the_value_and_gradient_of_its_formula(background: bool, smooth: float) -> None:
    loss = Dice(reduction="mean", smooth=smooth, background=background).build()

    def expect(logits: np.ndarray, labels: np.ndarray) -> float:
        return expect_dice(logits, labels, smooth, background)

    assert_agrees(loss, expect, LOGITS, LABELS)
    assert_agrees(loss, expect, LOGITS, LABELS, WHERE)


@pytest.mark.medium
def test_lovasz_has_the_value_and_gradient_of_its_definition() -> None:
    loss = LovaszSoftmax(reduction="mean").build()
    assert_agrees(loss, expect_lovasz, LOGITS, LABELS)
    assert_agrees(loss, expect_lovasz, LOGITS, LABELS, WHERE)


@pytest.mark.medium
def test_lovasz_of_certain_predictions_is_one_minus_intersection_over_union() -> None:
    """At the corners of the cube the extension is the set function."""
    predicted = GENERATOR.integers(0, CLASSES, LABELS.shape)
    found = LovaszSoftmax(reduction="mean").build()(
        jnp.asarray(100 * np.eye(CLASSES)[predicted], jnp.float32), jnp.asarray(LABELS)
    )
    for value, mask, truth in zip(found, predicted, LABELS, strict=True):
        losses = []
        for number in np.unique(truth):
            areas = mask == number, truth == number
            losses.append(1 - (areas[0] & areas[1]).sum() / (areas[0] | areas[1]).sum())
        assert float(value) == pytest.approx(np.mean(losses), abs=1e-6)


@pytest.mark.medium
def test_dice_cross_entropy_is_the_sum_of_both() -> None:
    keys = {**NO_SMOOTHING, "smoothing": 0.1, "class_weights": (1.0, 2.0, 3.0), "z_loss": 1e-2}
    loss = DiceCrossEntropy(**keys, dice_weight=0.3, smooth=2.0, background=False).build()
    for where in ((), (jnp.asarray(WHERE),)):
        arguments = jnp.asarray(LOGITS), jnp.asarray(LABELS), *where
        dice = Dice(reduction="mean", smooth=2.0, background=False).build()(*arguments)
        expected = CrossEntropy(**keys).build()(*arguments) + 0.3 * dice
        np.testing.assert_allclose(loss(*arguments), expected, rtol=1e-6)


LOSSES = [
    Dice(reduction="mean"),
    DiceCrossEntropy(**NO_SMOOTHING),
    LovaszSoftmax(reduction="mean"),
]


@pytest.mark.medium
@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.name)
def test_ignored_positions_have_no_effect(spec: Dice) -> None:
    """Whatever the network says there, and a mask without a valid label has loss 0."""
    loss, where = spec.build(), jnp.asarray(WHERE)
    labels = jnp.asarray(np.where(WHERE, LABELS, 255))
    spoilt = jnp.where(where[..., None], jnp.asarray(LOGITS), jnp.inf)
    losses = loss(spoilt, labels, where)
    np.testing.assert_array_equal(losses, loss(jnp.asarray(LOGITS), jnp.asarray(LABELS), where))
    assert float(losses[3]) == 0
    gradient = jax.grad(lambda logits: loss(logits, labels, where).sum())(spoilt)
    assert np.isfinite(gradient).all()
    assert not np.asarray(gradient)[~WHERE].any()


@pytest.mark.medium
@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.name)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_extreme_logits_have_finite_losses_and_gradients(spec: Dice, dtype: str) -> None:
    """All right, all wrong, and equal errors everywhere."""
    labels = jnp.asarray(LABELS)
    loss = spec.build()
    right = 200 * np.eye(CLASSES)[LABELS]
    for logits in (right, right[..., ::-1], np.zeros_like(right)):
        values = jnp.asarray(logits, dtype)
        losses = loss(values, labels)
        gradient = jax.grad(lambda logits: loss(logits, labels).sum())(values)
        assert losses.dtype == jnp.float32
        assert np.isfinite(losses).all()
        assert np.isfinite(np.asarray(gradient, np.float32)).all()
    np.testing.assert_allclose(loss(jnp.asarray(right, dtype), labels), 0, atol=1e-6)


@pytest.mark.parametrize("spec", LOSSES, ids=lambda spec: spec.name)
@pytest.mark.parametrize(
    ("logits", "labels", "message"),
    [
        (
            LOGITS,
            np.eye(CLASSES, dtype=np.float32)[LABELS],
            "labels of float32 are soft or one-hot, and",
        ),
        (
            LOGITS[:, 0, 0],
            LABELS[:, 0, 0],
            "have no positions, such as pixels, and losses of areas need",
        ),
        (LOGITS, LABELS[:, :2], r"do not fit logits of shape \(4, 3, 5, 3\)"),
    ],
)
def test_unsuitable_labels_are_refused(
    spec: Dice, logits: np.ndarray, labels: np.ndarray, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        spec.build()(jnp.asarray(logits), jnp.asarray(labels))


@pytest.mark.parametrize(
    "spec",
    [
        Dice(reduction="mean", background=False),
        DiceCrossEntropy(**NO_SMOOTHING, background=False),
    ],
)
def test_background_alone_is_refused(spec: Dice) -> None:
    with pytest.raises(ValueError, match="background = false: needs at least 2 classes, not 1"):
        spec.fit_to_targets(Targets(("sky",)))
    assert spec.fit_to_targets(Targets(("sky", "bird"))) == spec


def test_smooth_of_zero_is_refused() -> None:
    """It makes NaN of a class that is neither there nor predicted."""
    with pytest.raises(ValidationError, match="smooth"):
        Dice(reduction="mean", smooth=0.0)
