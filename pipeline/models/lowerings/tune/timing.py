"""Time a computation where a sink will run it: in the body of a loop."""

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

from pipeline.core.files.compile_cache import no_compile_cache
from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.formulas.matmuls import as_bits, from_bits
from pipeline.models.lowerings.problem.lowering import Lowering, Problem

ROUNDS = 4
ROUND_S = 0.02
"""Seconds for which a round repeats the computation, from a quarter of it on."""
MORE = 4
MOST_CALLS = 4096
"""Factor by which calls in a round grow until it is long enough, and their maximum."""

SHORTEST_S = 1e-8
"""Least time that is reported: with noise a difference may be 0 or less."""


class Timer:
    """Times functions of the same tuple of operands, the first of which is an array of numbers.

    Each of `rounds` repeats a function for a quarter to all of `round_s` seconds, at least once.
    """

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
        """Microseconds per call; only one call is timed if it takes `give_up_us`.

        The result is the minimum of several rounds, since other load only adds to a time. The time
        around the loop, such as copies of the operands, is subtracted.
        """
        lowered = repeatedly(function).lower(self._operands, np.int32(1))
        with no_compile_cache():
            run = lowered.compile()
        self._seconds(run, 1)
        around_s = self._seconds(run, 0)
        once_s = self._seconds(run, 1)
        call_s = once_s - around_s
        if call_s * 1e6 > give_up_us:
            return call_s * 1e6
        count = 1
        round_s = call_s
        while round_s < self._round_s / MORE and count < MOST_CALLS:
            count *= MORE
            round_s = self._seconds(run, count) - around_s
        around_s = min(around_s, *(self._seconds(run, 0) for _ in range(self._rounds)))
        rounds_s = min(self._seconds(run, count) for _ in range(self._rounds)) - around_s
        return 1e6 * max(rounds_s / count, SHORTEST_S)

    def _seconds(self, run: Any, count: int) -> float:
        started_at = time.perf_counter()
        jax.block_until_ready(run(self._operands, np.int32(count)))
        return time.perf_counter() - started_at


class Stopwatch(Timer):
    """Times the lowerings of one problem on the same operands."""

    def __init__(self, problem: Problem, device: jax.Device) -> None:
        self._problem = problem
        shapes = problem.operand_shapes
        super().__init__(tuple(random_operands(shape, problem.dtype) for shape in shapes), device)

    def __call__(self, lowering: Lowering, give_up_us: float) -> float:
        """Microseconds per call of a lowering, by `Timer.time_us`."""
        return self.time_us(partial(compute, self._problem, lowering), give_up_us)


def repeatedly(function: Callable[..., Any]) -> Any:
    """Jit a loop of `count` calls, each on operands that depend on the last result.

    The loop carries all of the result, so that the compiler can't skip a part of it.
    """

    def run(operands: tuple[Any, ...], count: Array) -> Any:
        first, *constants = operands
        shapes = jax.eval_shape(function, operands)

        def body(_: Array, carry: tuple[Array, Any]) -> tuple[Array, Any]:
            # A call that XLA doesn't look into: it could move computations out of the loop, or
            # compute a result again for its corner.
            with set_xla_metadata(inlineable="false"):
                result = jax.jit(function)((carry[0], *constants))
            corners = jnp.stack([_corner(leaf) for leaf in jax.tree.leaves(result)])
            return _add_to_corner(carry[0], 1e-30 * corners.astype(jnp.float32).sum()), result

        start = jax.tree.map(lambda shape: jnp.zeros(shape.shape, shape.dtype), shapes)
        return lax.fori_loop(0, count, body, (first, start))[1]

    return jax.jit(run)


def _corner(array: Array) -> Array:
    return from_bits(as_bits(array)[(0,) * array.ndim], array.dtype)


def _add_to_corner(array: Array, number: Array) -> Array:
    """The array with `by` added to its first value, in place."""
    value = (_corner(array) + number).astype(array.dtype)
    return from_bits(as_bits(array).at[(0,) * array.ndim].set(as_bits(value)), array.dtype)


def random_operands(shape: tuple[int, ...], dtype: Any) -> Array:
    """Numbers between -1 and 1, none so small that arithmetic is slow (subnormal)."""
    values = np.resize(np.random.default_rng(0).uniform(-1, 1, 4096), shape)
    return jnp.asarray(values, dtype)
