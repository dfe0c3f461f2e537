"""Losses that are not reduced, and lists of rates by parameter group, against MindSpore (L-01,
L-03)."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest
from flax import linen as nn

from pipeline.data.batch import Batch
from tests.golden.make_reductions import (
    BIAS_RATES,
    CLASSES,
    FEATURES,
    FILE,
    RATES,
    STEPS,
    WEIGHT,
    batches,
)
from tests.training.step_configs import read_image
from tests.training.test_step import make_batch, make_step, start

EXPECTED = json.loads(FILE.read_text())


class OneDense(nn.Module):
    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        return nn.Dense(CLASSES, name="dense")(images.reshape(images.shape[0], -1))


def as_batch(images: np.ndarray, labels: np.ndarray) -> Batch:
    columns = {"image": images[:, None, None, :], "label": labels}
    return replace(make_batch(samples=len(labels)), columns=columns)


def assert_equal_to(expected: Mapping[str, Any], rates: np.ndarray, **changed: Any) -> None:
    """Loss, weights and bias after each step are MindSpore's."""
    inputs = read_image((1, 1, FEATURES))
    step = make_step(
        network=OneDense(), inputs=inputs, classes=CLASSES, train_ops=(), eval_ops=(), **changed
    )
    state = start(step)
    params = {"dense": {"kernel": WEIGHT.T, "bias": np.zeros(CLASSES, np.float32)}}
    state = replace(state, params=params)
    for number, (images, labels) in enumerate(batches()):
        state, record = step.step(state, as_batch(images, labels), rates)
        dense = state.params["dense"]
        assert float(record.loss) == pytest.approx(expected["losses"][number], rel=1e-5)
        weights, biases = expected["weights"][number], expected["biases"][number]
        np.testing.assert_allclose(dense["kernel"].T, weights, rtol=1e-4, atol=1e-6)
        np.testing.assert_allclose(dense["bias"], biases, rtol=1e-4, atol=1e-6)


@pytest.mark.slow
@pytest.mark.parametrize("reduction", ["none", "sum", "mean"])
def test_golden_reductions(reduction: str) -> None:
    """MindSpore's loss that is not reduced has a gradient of ones; LossMonitor prints its mean."""
    rates = np.full(STEPS, 0.5, np.float32)
    assert_equal_to(EXPECTED[reduction], rates, reduction=reduction)


@pytest.mark.slow
def test_golden_rates_by_group() -> None:
    rates = np.array([RATES, BIAS_RATES], np.float32).T
    assert_equal_to(EXPECTED["groups"], rates, rate_groups=("dense/bias",))
