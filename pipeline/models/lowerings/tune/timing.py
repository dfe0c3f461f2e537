"""Time a computation in the body of a loop, as in a sink."""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.core.host.jax_private import disable_compile_cache
from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.formulas.matmuls import as_bits, from_bits
from pipeline.models.lowerings.problem.lowering import Lowering
from pipeline.models.lowerings.problem.problems import Problem

ROUNDS = 4
ROUND_S = 0.02
"""Longest time of a round in seconds. A round takes at least a quarter of it."""
CALLS_FACTOR = 4
MAX_CALLS = 4096
"""Factor by which the calls of a round grow until it is long enough, and the most calls."""

SHORTEST_S = 1e-8
"""Least time that is returned, since a noisy difference may be 0 or less."""


class Timer:
    """Times functions of the same tuple of operands; the first is an array of numbers. Each of
    `rounds` repeats a function for a quarter to all of `round_s` seconds, at least once."""

    def __init__(
        self,
        operands: tuple[Any, ...],
        device: jax.Device,
        rounds: int = ROUNDS,
        round_s: float = ROUND_S,
    ) -> None:
        self._operands = jax.device_put(operands, device)
        self._rounds = rounds
        self._round_s = round_s

    def time_us(self, function: Callable[..., Any], give_up_us: float = float("inf")) -> float:
        """Return microseconds per call; a call longer than `give_up_us` is timed only once. The
        result is the minimum of several rounds, since other load only adds to a time. The time
        around the loop, such as copies of the operands, is subtracted."""
        lowered = jit_repeated(function).lower(self._operands, np.int32(1))
        with disable_compile_cache():
            run = lowered.compile()
        self._time_loop(run, 1)  # warms up
        overhead_s = self._time_loop(run, 0)
        once_s = self._time_loop(run, 1)
        call_s = once_s - overhead_s
        if call_s * 1e6 > give_up_us:
            return call_s * 1e6
        count = 1
        round_s = call_s
        while round_s < self._round_s / CALLS_FACTOR and count < MAX_CALLS:
            count *= CALLS_FACTOR
            round_s = self._time_loop(run, count) - overhead_s
        overhead_s = min(overhead_s, *(self._time_loop(run, 0) for _ in range(self._rounds)))
        round_s = min(self._time_loop(run, count) for _ in range(self._rounds)) - overhead_s
        return 1e6 * max(round_s / count, SHORTEST_S)

    def _time_loop(self, run: Any, count: int) -> float:
        started_at = time.perf_counter()
        jax.block_until_ready(run(self._operands, np.int32(count)))
        return time.perf_counter() - started_at


class Stopwatch(Timer):
    """Times the lowerings of one problem on the same operands."""

    def __init__(self, problem: Problem, device: jax.Device) -> None:
        self._problem = problem
        shapes = problem.operand_shapes
        super().__init__(
            tuple(make_random_operand(shape, problem.dtype) for shape in shapes), device
        )

    def __call__(self, lowering: Lowering, give_up_us: float) -> float:
        """Return the microseconds per call of a lowering, as `Timer.time_us`."""
        return self.time_us(partial(compute, self._problem, lowering), give_up_us)


def jit_repeated(function: Callable[..., Any]) -> Any:
    """Jit a loop of `count` calls, each on operands that depend on the last result. The loop
    carries the whole result, so that the compiler can't skip a part of it."""

    def run(operands: tuple[Any, ...], count: Array) -> Any:
        first, *constants = operands
        shapes = jax.eval_shape(function, operands)

        def body(_: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            # XLA doesn't inline this call. Otherwise it could move computations out of the loop, or
            # compute a result again for its corner.
            with set_xla_metadata(inlineable="false"):
                result = jax.jit(function)((carry[0], *constants))
            corners = jnp.stack([_take_corner(leaf) for leaf in jax.tree.leaves(result)])
            return _add_to_corner(carry[0], 1e-30 * corners.astype(jnp.float32).sum()), result

        start = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return lax.fori_loop(0, count, body, (first, start))[1]

    return jax.jit(run)


def _take_corner(array: Array) -> Array:
    return from_bits(as_bits(array)[(0,) * array.ndim], array.dtype)


def _add_to_corner(array: Array, number: Array) -> Array:
    """Return the array with a number added to its first value, in place."""
    value = (_take_corner(array) + number).astype(array.dtype)
    return from_bits(as_bits(array).at[(0,) * array.ndim].set(as_bits(value)), array.dtype)


def make_random_operand(shape: tuple[int, ...], dtype: Any) -> Array:
    """Return numbers between -1 and 1, without subnormal numbers, which are slow."""
    values = np.resize(np.random.default_rng(0).uniform(-1, 1, 4096), shape)
    return jnp.asarray(values, dtype)
