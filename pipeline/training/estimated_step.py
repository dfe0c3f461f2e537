"""A step for estimates of its cost, without what depends on the data."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
from jax import Array

from pipeline.training.losses import compute_divisor
from pipeline.training.state import Inputs, TrainState
from pipeline.training.step import compute_gradients, mask_batch
from pipeline.training.step_config import StepConfig
from pipeline.training.update import apply_update

LAST_STEP: Any = 2**31 - 1
"""A number of steps that no run exceeds."""


def make_estimated_step(
    config: StepConfig, learning_rate: Array | float
) -> Callable[[TrainState, tuple[Inputs, Array]], tuple[TrainState, Array]]:
    """Make a step for cost estimates: (state, (inputs, labels)) -> (new state, loss). With rate
    groups, `learning_rate` is (1 + groups,).

    Inputs are those of the network, after the map ops. The step trains the parameters of the last
    phase, which are the most. It has no map ops, loss scale, gradient norm, ledger or check for
    non-finite values.
    """
    for feature in config.features:
        config = feature.choose_config(config, LAST_STEP, lambda last_config: last_config)
    readers = config.list_acting("add_readings")
    others = tuple(feature for feature in config.features if feature not in readers)
    config = replace(config, features=others)

    def step(state: TrainState, batch: tuple[Inputs, Array]) -> tuple[TrainState, Array]:
        inputs, labels = batch
        count = labels.shape[0]
        dropout_key = jax.random.fold_in(jax.random.key(0), state.step)
        mapped = mask_batch(inputs, labels, count, dropout_key)
        divisor = compute_divisor(config, labels, mapped.mask, count)
        gradients = compute_gradients(config, state, mapped, divisor, 1.0)
        return apply_update(config, state, gradients, count, 1.0, learning_rate), gradients.loss

    return step
