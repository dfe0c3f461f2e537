"""SWA and LAWA against means in numpy, and the statistics of batch norm with them.

Lookahead against a loop in numpy.
"""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import flax.linen as nn
import jax
import numpy as np
import pytest

from pipeline.core.errors import RecipeError
from pipeline.training.features.components.weight_averages import Lawa, Lookahead, Swa, SwaSpec
from pipeline.training.step import get_evaluated_weights
from tests.training.test_step import CLASSES, RATES, flat, make_batch, make_config, make_step, start

UPDATES = 12


def evaluate_after_updates(feature: Any) -> tuple[list[np.ndarray], list[np.ndarray]]:
    """The trained and the evaluated weights after each update."""
    features = (*make_config().features, feature)
    step, config = make_step(features=features), make_config(features=features)
    state = start(step)
    trained, evaluated = [], []
    for number in range(UPDATES):
        state, _ = step.step(state, make_batch(number), RATES)
        trained.append(flat(state.params))
        evaluated.append(flat(get_evaluated_weights(config, state)["params"]))
    return trained, evaluated


@pytest.mark.slow
@pytest.mark.parametrize(
    ("feature", "ends"),
    [
        (Swa(start=4, period=3), lambda t: [u for u in (4, 7, 10) if u <= t]),
        (Swa(start=1, period=1), lambda t: [*range(1, t + 1)]),
        (Lawa(count=3, period=2), lambda t: [u for u in (2, 4, 6, 8, 10, 12) if u <= t][-3:]),
        (Lawa(count=2, period=5), lambda t: [u for u in (5, 10) if u <= t]),
    ],
    ids=["swa", "swa of each", "lawa", "lawa not yet full"],
)
def test_evaluated_weights_are_the_mean_of_the_ends(
    feature: Any, ends: Callable[[int], list[int]]
) -> None:
    trained, evaluated = evaluate_after_updates(feature)
    for t in range(1, UPDATES + 1):
        expected = np.mean([trained[u - 1] for u in ends(t) or [t]], axis=0)
        np.testing.assert_allclose(evaluated[t - 1], expected, rtol=1e-6, atol=1e-7)


class Normalized(nn.Module):
    """A layer whose outputs are normalized; the statistics are those of the last batch alone."""

    @nn.compact
    def __call__(self, images: jax.Array, train: bool) -> jax.Array:
        flat = images.reshape(images.shape[0], -1)
        outputs = nn.Dense(CLASSES, use_bias=False, name="dense")(flat)
        return nn.BatchNorm(use_running_average=not train, momentum=0.0, name="norm")(outputs)


@pytest.mark.slow
def test_running_statistics_are_those_of_the_evaluated_weights() -> None:
    features = (*make_config().features, Swa(start=1, period=3))
    parts = {"network": Normalized(), "features": features}
    step, config = make_step(**parts), make_config(**parts)
    state = start(step)
    for number in range(6):
        # Statistics are taken before the update.
        kernel = np.float64(get_evaluated_weights(config, state)["params"]["dense"]["kernel"])
        trained = np.float64(state.params["dense"]["kernel"])
        batch = make_batch(number)
        state, _ = step.step(state, batch, RATES)
        factor = config.train_ops[0].factor
        images = factor * np.float64(batch.columns["image"]).reshape(len(batch.sample), -1)
        mean = state.collections["batch_stats"]["norm"]["mean"]
        np.testing.assert_allclose(mean, (images @ kernel).mean(axis=0), rtol=1e-4, atol=1e-5)
    assert not np.allclose(mean, (images @ trained).mean(axis=0), rtol=1e-2, atol=1e-3)


@pytest.mark.medium
@pytest.mark.parametrize(
    ("overrides", "words"),
    [
        (["train.features=[{name: swa, steps: 3, epochs: 1.0}]"], "steps = 3 and epochs = 1.0"),
        (["train.features=[{name: lawa, count: 1}]"], "count"),
        (["optimizer=thor", "train.features=[swa]"], "must be another optimizer with swa"),
    ],
)
def test_unfit_average_is_refused(
    overrides: list[str], words: str, tiny: Callable[..., Any]
) -> None:
    with pytest.raises(RecipeError) as caught:
        tiny(*overrides)
    assert words in str(caught.value)


def test_run_without_a_second_average_is_refused() -> None:
    """Its evaluations would use the weights of one update, three quarters of the run."""
    context: Any = SimpleNamespace(steps_per_epoch=100, total_steps=200)
    with pytest.raises(ValueError, match="from update 150 on, every 100 updates, and the run has"):
        SwaSpec().build(context)
    assert SwaSpec(steps=50).build(context) == Swa(150, 50)


@pytest.mark.slow
def test_slow_weights_follow_the_fast_ones() -> None:
    """Two runs: one without lookahead gives each update from the same weights."""
    steps, rate = 3, 0.5
    features = make_config().features
    step = make_step(features=(*features, Lookahead(steps, rate)))
    plain = make_step()
    state = start(step)
    fast = start(plain)
    slow = flat(fast.params)
    for number in range(7):
        batch = make_batch(number)
        state, _ = step.step(state, batch, RATES)
        fast, _ = plain.step(fast, batch, RATES)
        expected = flat(fast.params)
        if (number + 1) % steps == 0:
            slow = slow + rate * (expected - slow)
            fast = fast.replace_variables({"params": state.params, **fast.collections})
            expected = slow
        np.testing.assert_allclose(flat(state.params), expected, rtol=1e-6, atol=1e-7)
        np.testing.assert_allclose(flat(state.features["lookahead"]), slow, rtol=1e-6, atol=1e-7)
