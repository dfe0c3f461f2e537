"""Overlap of regions and accuracies against loops over labels."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.component_specs import MetricSpec
from pipeline.training.target_metrics import BalancedAccuracy, MeanIou, PixelAccuracy

RNG = np.random.default_rng(4)
CLASSES = 4
LOGITS = RNG.standard_normal((7, 5, 6, CLASSES), dtype=np.float32)
LABELS = RNG.integers(0, CLASSES - 1, (7, 5, 6)).astype(np.uint8)
LABELS[RNG.random(LABELS.shape) < 0.2] = 255
MASK = np.array([True] * 6 + [False])


def value(metric: MetricSpec, logits: np.ndarray, labels: np.ndarray, mask: np.ndarray) -> float:
    """The metric from sums over batches of 3."""
    total = jax.tree.map(np.asarray, metric.zero(logits.shape[-1]))
    for first in range(0, len(logits), 3):
        rows = slice(first, first + 3)
        given = jnp.asarray(logits[rows]), jnp.asarray(labels[rows]), jnp.asarray(mask[rows])
        total = jax.tree.map(np.add, total, jax.device_get(metric.sums(*given)))
    return metric.value(total)


def counted(ignored: set[int]) -> tuple[np.ndarray, np.ndarray]:
    """True and predicted classes of the labels that count."""
    predicted = LOGITS.argmax(axis=-1)
    kept = [
        (int(label), int(guess))
        for number, ok in enumerate(MASK)
        if ok
        for label, guess in zip(LABELS[number].ravel(), predicted[number].ravel(), strict=True)
        if label < CLASSES and label not in ignored
    ]
    true, guessed = zip(*kept, strict=True)
    return np.array(true), np.array(guessed)


@pytest.mark.slow
@pytest.mark.parametrize("ignored", [None, 255, 1])
def test_mean_iou_matches_sets(ignored: int | None) -> None:
    true, guessed = counted({ignored} if ignored is not None else set())
    shares = []
    for kind in range(CLASSES):
        own, found = set(np.flatnonzero(true == kind)), set(np.flatnonzero(guessed == kind))
        if own | found:
            shares.append(len(own & found) / len(own | found))
    metric = MeanIou().ignore_label(ignored)
    assert value(metric, LOGITS, LABELS, MASK) == pytest.approx(np.mean(shares), abs=1e-12)


@pytest.mark.medium
def test_pixel_accuracy_is_the_share_of_correct_pixels() -> None:
    true, guessed = counted(set())
    expected = (true == guessed).mean()
    assert value(PixelAccuracy(), LOGITS, LABELS, MASK) == pytest.approx(expected, abs=1e-12)


@pytest.mark.medium
def test_balanced_accuracy_is_the_mean_recall_of_present_classes() -> None:
    """No label is of the last class."""
    true, guessed = counted(set())
    recalls = [(guessed[true == kind] == kind).mean() for kind in np.unique(true)]
    assert len(recalls) == CLASSES - 1
    found = value(BalancedAccuracy(), LOGITS, LABELS, MASK)
    assert found == pytest.approx(np.mean(recalls), abs=1e-12)


@pytest.mark.medium
def test_pixel_accuracy_accepts_class_and_soft_labels() -> None:
    logits, labels = LOGITS[:, 0, 0], LABELS[:, 0, 0] % CLASSES
    hot = np.eye(CLASSES, dtype=np.float32)[labels] * 0.8
    for given in (labels, hot):
        found = value(PixelAccuracy(), logits, given, MASK)
        assert found == pytest.approx((logits.argmax(-1) == labels)[MASK].mean())


def test_custom_label_is_not_replaced() -> None:
    assert MeanIou(ignore_index=3).ignore_label(255).ignore_index == 3
    assert MeanIou().ignore_label(255).ignore_index == 255


def test_metrics_without_samples_are_zero() -> None:
    for metric in (MeanIou(), PixelAccuracy(), BalancedAccuracy()):
        assert metric.value(metric.zero(3)) == 0.0
