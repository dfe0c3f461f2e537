"""The shortest of several calls."""

from __future__ import annotations

import time

import jax.numpy as jnp
from jax import Array

from pipeline.core.host.measured_time import measure_shortest_s


def test_shortest_time_ignores_first_and_slow_calls() -> None:
    pauses_s = iter([0.3, 0.05, 0.01, 0.05, 0.05])

    def call(x: Array) -> Array:
        time.sleep(next(pauses_s, 0.05))
        return x

    assert 0.01 <= measure_shortest_s(call, jnp.zeros(()), budget_s=0.0) < 0.05


def test_larger_budget_makes_more_calls() -> None:
    pauses_s = iter([0.05] * 6 + [0.005])

    def call(x: Array) -> Array:
        time.sleep(next(pauses_s, 0.05))
        return x

    assert 0.005 <= measure_shortest_s(call, jnp.zeros(()), budget_s=0.5) < 0.05
