"""The shortest of several calls."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import jax.numpy as jnp
import pytest
from jax import Array

from pipeline.core.host.measured_time import measure_shortest_s


@pytest.fixture
def calls_take(
    monkeypatch: pytest.MonkeyPatch,
) -> Callable[[Sequence[float]], Callable[..., Array]]:
    """Return a function whose calls take these seconds, then 0.05, by a clock that only they
    move."""

    def make_call(seconds: Sequence[float]) -> Callable[[Array], Array]:
        now_s = 0.0
        left_s = iter(seconds)

        def call(x: Array) -> Array:
            nonlocal now_s
            now_s += next(left_s, 0.05)
            return x

        monkeypatch.setattr(time, "perf_counter", lambda: now_s)
        return call

    return make_call


def test_shortest_time_ignores_first_and_slow_calls(
    calls_take: Callable[[Sequence[float]], Callable[..., Array]],
) -> None:
    call = calls_take([0.3, 0.05, 0.01, 0.05, 0.05])
    assert measure_shortest_s(call, jnp.zeros(()), budget_s=0.0) == pytest.approx(0.01)


def test_larger_budget_makes_more_calls(
    calls_take: Callable[[Sequence[float]], Callable[..., Array]],
) -> None:
    times_s = [0.05] * 6 + [0.005]
    call = calls_take(times_s)
    assert measure_shortest_s(call, jnp.zeros(()), budget_s=0.0) == pytest.approx(0.05)
    call = calls_take(times_s)
    assert measure_shortest_s(call, jnp.zeros(()), budget_s=0.5) == pytest.approx(0.005)
