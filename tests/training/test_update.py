"""Updates against numpy: rates of groups and layers, and moving averages."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.training.component_specs import AverageSpec
from pipeline.training.features.averages import update_ema
from pipeline.training.update import apply_directions
from tests.training.test_step import make_config

PARAMS: dict[str, Any] = {
    "conv": {"kernel": jnp.asarray([1.0, 2.0]), "bias": jnp.asarray([3.0])},
    "head": {"kernel": jnp.asarray([4.0])},
}
DOWN: dict[str, Any] = {
    "conv": {"kernel": jnp.asarray([1.0, 1.0]), "bias": jnp.asarray([1.0])},
    "head": {"kernel": jnp.asarray([1.0])},
}


@pytest.mark.parametrize(
    ("groups", "by_layer", "rates"),
    [
        ((), {}, {"conv/kernel": 0.5, "conv/bias": 0.5, "head/kernel": 0.5}),
        (("conv",), {}, {"conv/kernel": 0.25, "conv/bias": 0.25, "head/kernel": 0.5}),
        (
            ("conv", "conv/bias"),
            {},
            {"conv/kernel": 0.25, "conv/bias": 0.125, "head/kernel": 0.5},
        ),
        ((), {"head": 0.5}, {"conv/kernel": 0.5, "conv/bias": 0.5, "head/kernel": 0.25}),
        (("head",), {"head": 0.5}, {"conv/kernel": 0.5, "conv/bias": 0.5, "head/kernel": 0.125}),
    ],
)
def test_last_matching_group_sets_the_rate(
    groups: tuple[str, ...], by_layer: dict[str, float], rates: dict[str, float]
) -> None:
    by_group = jnp.asarray([0.5, 0.25, 0.125])[: 1 + len(groups)] if groups else 0.5
    changed = {"rate_groups": groups or None, "layer_rates": by_layer or None}
    updated = apply_directions(make_config(**changed), PARAMS, DOWN, by_group)
    for path, rate in rates.items():
        scope, name = path.split("/")
        np.testing.assert_allclose(updated[scope][name], PARAMS[scope][name] - rate)


@pytest.mark.parametrize("warmup", [False, True])
def test_average_follows_its_decay(warmup: bool) -> None:
    spec = AverageSpec.model_construct(decay=0.9, warmup=warmup)
    values = np.random.default_rng(0).standard_normal(40)
    average = expected = values[0]
    for count, value in enumerate(values):
        decay = min(0.9, (1 + count) / (10 + count)) if warmup else 0.9
        expected = decay * expected + (1 - decay) * value
        average = update_ema(average, jnp.float32(value), spec, jnp.int32(count))
    np.testing.assert_allclose(average, expected, rtol=1e-4)
