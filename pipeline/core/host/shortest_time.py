"""Measurement of a call's time by the shortest of several calls.

Other work on the machine can only make a call longer.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

LEAST_CALLS = 3


def measure_shortest_s(call: Callable[..., Any], *arguments: Any, budget_s: float) -> float:
    """Return the shortest time in seconds of at least three calls, in about `budget_s` seconds."""
    jax.block_until_ready(call(*arguments))  # Compiles.
    times_s: list[float] = []
    end_s = time.perf_counter() + budget_s
    while len(times_s) < LEAST_CALLS or time.perf_counter() < end_s:
        start_s = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times_s.append(time.perf_counter() - start_s)
    return min(times_s)
