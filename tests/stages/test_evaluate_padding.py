"""Padded evaluation (D-17): every sample is counted exactly once, whatever the batch size."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.backends.loading import loader as loader_module
from pipeline.config.recipe import Recipe
from pipeline.data.order import SampleOrder
from pipeline.stages.evaluate import EvalOptions, evaluate
from tests.stages.test_evaluate import SMALL, logits_by_hand, prepare

Compose = Callable[..., Recipe]

SAMPLES = 40


@given(samples=st.integers(1, 300), batch_size=st.integers(1, 400))
def test_evaluation_has_every_sample_once_at_any_batch_size(samples: int, batch_size: int) -> None:
    """D-17: the real samples of the batches, in order, are the split; each batch is full."""
    order = SampleOrder(
        seed=0,
        samples=samples,
        batch_size=batch_size,
        shuffle=False,
        buffer_size=None,
        drop_remainder=False,
        repeat=1,
    )
    batches = order.batches(0, order.steps_per_epoch)
    assert batches.indices.shape == (-(-samples // batch_size), batch_size)
    real = [
        sample
        for row, count in zip(batches.indices.tolist(), batches.counts, strict=True)
        for sample in row[:count]
    ]
    assert real == list(range(samples))
    assert (batches.counts >= 1).all()


@pytest.mark.slow
@pytest.mark.parametrize("feed", ["resident", "stream"])
@pytest.mark.parametrize("batch_size", [3, 7, 39, 41, 1000])
def test_sums_match_sums_of_single_samples(
    batch_size: int, feed: str, tiny: Compose, monkeypatch: pytest.MonkeyPatch
) -> None:
    """D-17, E-01: with a short batch, one short by one, one sample over, and hardly a sample."""
    monkeypatch.setattr(loader_module, "WINDOW_STEPS", 4)
    recipe = tiny(*SMALL, f"dataset.eval.batch_size={batch_size}", f"train.feed={feed}")
    executable, dataset = prepare(recipe)
    state = executable.init()
    evaluation = evaluate(executable, state, dataset, EvalOptions(1.0))

    labels = np.asarray(dataset.eval.columns["label"][:])
    predicted = logits_by_hand(state, dataset.eval.columns["image"][:]).argmax(axis=1)
    pairs = Counter(zip(labels.tolist(), predicted.tolist(), strict=True))
    counted = {
        (true, guess): int(count)
        for (true, guess), count in np.ndenumerate(evaluation.confusion)
        if count
    }
    assert evaluation.metrics["count"] == SAMPLES
    assert counted == dict(pairs)
    assert evaluation.metrics["accuracy"] == (predicted == labels).mean()
