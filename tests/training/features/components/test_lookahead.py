"""Lookahead against a loop in numpy."""

from __future__ import annotations

import numpy as np
import pytest

from pipeline.training.features.components.lookahead import Lookahead
from tests.training.test_step import RATES, flat, make_batch, make_config, make_step, start


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
