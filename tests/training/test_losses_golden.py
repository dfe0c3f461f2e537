"""Ignored labels and the hardest samples, against PyTorch and MindSpore (M-13)."""

from __future__ import annotations

import json

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.losses import (
    CrossEntropy,
    compute_divisor,
    compute_losses,
    reduce_losses,
)
from pipeline.training.step_config import StepConfig
from tests.golden.make_losses import CLASSES, FOLDER, IGNORED, SHAPES, SHARE, SMOOTHINGS, cases
from tests.training.step_configs import change_config
from tests.training.test_step import make_config

LOSSES = json.loads((FOLDER / "losses.json").read_text())["losses"]


def loss_of(parts: StepConfig, logits: jax.Array, labels: np.ndarray) -> jax.Array:
    """The loss of a batch, as a step computes it."""
    valid = jnp.ones(len(labels), bool)
    whole = compute_divisor(parts, jnp.asarray(labels), valid, len(labels))
    losses = compute_losses(parts, logits, jnp.asarray(labels))
    return reduce_losses(parts, losses, jnp.asarray(labels), valid, whole).minimised


def assert_equal_to(name: str, parts: StepConfig, logits: np.ndarray, labels: np.ndarray) -> None:
    """Loss and gradient are PyTorch's, the loss is MindSpore's."""
    labels = labels.astype(np.int32)
    loss, gradient = jax.value_and_grad(loss_of, argnums=1)(parts, jnp.asarray(logits), labels)
    for system in ("torch", "mindspore"):
        assert float(loss) == pytest.approx(LOSSES[system][name], rel=1e-6)
    with np.load(FOLDER / "gradients.npz") as gradients:
        np.testing.assert_allclose(gradient, gradients[name], rtol=1e-5, atol=1e-8)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SMOOTHINGS)
@pytest.mark.parametrize("name", SHAPES)
def test_golden_ignored_labels(name: str, kind: str) -> None:
    """The mean is over all labels of the batch that count, however many a sample has."""
    loss = CrossEntropy(
        reduction="mean", smoothing=SMOOTHINGS[kind], smoothing_convention="uniform"
    ).build()
    parts = make_config(loss=loss, classes=CLASSES, ignore_index=IGNORED[name])
    assert_equal_to(f"{name}_{kind}", parts, *cases()[name])


@pytest.mark.slow
def test_golden_hardest_share() -> None:
    logits, labels = cases()["image"]
    parts = make_config(classes=CLASSES, hardest_share=SHARE)
    assert_equal_to("hardest", parts, logits, labels % CLASSES)


@pytest.mark.slow
def test_ignored_labels_equal_removed_labels() -> None:
    """One label a sample: the loss of the others alone, the hardest of them too."""
    logits, labels = cases()["image"]
    labels = labels.astype(np.int32)
    kept = labels != IGNORED["image"]
    for share in (1.0, 0.5):
        plain = make_config(classes=CLASSES, hardest_share=share)
        for reduction in ("mean", "sum"):
            parts = change_config(plain, reduction=reduction)
            whole = loss_of(change_config(parts, ignore_index=-100), jnp.asarray(logits), labels)
            alone = loss_of(parts, jnp.asarray(logits[kept]), labels[kept])
            assert float(whole) == pytest.approx(float(alone), rel=1e-6)
