"""The shortest of several timed calls: others that use the machine can only make a call longer."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import jax

LEAST_CALLS = 3


def shortest_s(call: Callable[..., Any], *arguments: Any, budget_s: float) -> float:
    """Time a JAX function, once compiled, for about `budget_s` and three calls at least."""
    jax.block_until_ready(call(*arguments))
    times: list[float] = []
    until = time.perf_counter() + budget_s
    while len(times) < LEAST_CALLS or time.perf_counter() < until:
        began = time.perf_counter()
        jax.block_until_ready(call(*arguments))
        times.append(time.perf_counter() - began)
    return min(times)
