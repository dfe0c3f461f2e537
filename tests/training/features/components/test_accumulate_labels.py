"""Accumulation of gradients until they are of a number of labels."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.core.errors import RecipeError
from pipeline.training.features.components.accumulate_labels import AccumulateLabels
from pipeline.training.state import Gradients, TrainState
from pipeline.training.step_feature import StepFeature, UpdateOptimizer
from tests.training.test_step import (
    BATCH,
    RATES,
    assert_same,
    flat,
    make_batch,
    make_config,
    make_step,
    start,
)


@pytest.mark.slow
def test_update_is_of_the_mean_over_all_labels_since_the_last_one() -> None:
    """A batch of 4 and one of 3 samples are one batch of 7 samples."""
    features = make_config().features
    step = make_step(features=(*features, AccumulateLabels(BATCH + 2)))
    rates = np.full(4, RATES[0], np.float32)
    first, short = make_batch(1), make_batch(2, count=np.int32(3))
    columns = {
        name: np.concatenate([first.columns[name], short.columns[name]]) for name in first.columns
    }
    whole = make_batch(0, samples=2 * BATCH, columns=columns, count=np.int32(7))
    before = start(step)
    held, record = step.step(before, first, rates)
    assert_same((held.params, held.opt_state), (before.params, before.opt_state))
    assert (int(held.step), float(record.extras[0])) == (1, BATCH)
    after, record = step.step(held, short, rates)
    assert float(record.extras[0]) == 7
    expected, _ = make_step().step(start(make_step()), whole, rates)
    np.testing.assert_allclose(flat(after.params), flat(expected.params), rtol=1e-5, atol=1e-7)
    assert flat(after.features["accumulate_labels"]).sum() == 0


@dataclass(frozen=True)
class ZeroGradients(StepFeature):
    name: ClassVar[str] = "zero_gradients"

    def change_optimizer(
        self, update: UpdateOptimizer, state: TrainState, gradients: Gradients
    ) -> UpdateOptimizer:
        return lambda values: update(jax.tree.map(jnp.zeros_like, values))


@pytest.mark.slow
def test_gradients_that_a_later_feature_changes_are_refused() -> None:
    features = make_config().features
    step = make_step(features=(*features, ZeroGradients(), AccumulateLabels(BATCH)))
    before = start(step)
    after, _ = step.step(before, make_batch(1), np.full(4, RATES[0], np.float32))
    assert_same(after.params, before.params)
    step = make_step(features=(*features, AccumulateLabels(BATCH), ZeroGradients()))
    with pytest.raises(RecipeError, match=r"accumulate_labels must come after the features"):
        step.step(start(step), make_batch(1), np.full(4, RATES[0], np.float32))
