"""How long a lowering takes where a sink will run it: in the body of a loop."""

from __future__ import annotations

import time
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax

from pipeline.backends.program_cache import unkept
from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.lowering import Lowering, Problem

ROUNDS = 4
ROUND_S = 0.02
"""A round repeats the computation for about this long, and is done at least once."""


class Stopwatch:
    """Times the lowerings of one problem on operands that are made once."""

    def __init__(self, problem: Problem, device: jax.Device) -> None:
        self._problem = problem
        operands = (_made_up(shape, problem.dtype) for shape in problem.operand_shapes)
        self._operands = jax.device_put(tuple(operands), device)

    def __call__(self, how: Lowering, give_up_us: float) -> float:
        """Microseconds a computation; a single one is timed if it takes `give_up_us`.

        The least of some rounds: whatever else the machine does can only add to it.
        """
        lowered = _repeatedly(self._problem, how).lower(*self._operands, np.int32(1))
        with unkept():
            run = lowered.compile()
        self._seconds(run, 1)
        once_s = self._seconds(run, 1)
        if once_s * 1e6 > give_up_us:
            return once_s * 1e6
        count = max(1, int(ROUND_S / once_s))
        return 1e6 * min(self._seconds(run, count) / count for _ in range(ROUNDS))

    def _seconds(self, run: Any, count: int) -> float:
        begun = time.perf_counter()
        jax.block_until_ready(run(*self._operands, np.int32(count)))
        return time.perf_counter() - begun


def _repeatedly(problem: Problem, how: Lowering) -> Any:
    """The computation `count` times, each on operands that depend on the one before.

    The whole result is carried, so that no part of it can be left out.
    """

    def run(first: Array, second: Array, count: Array) -> Array:
        shape = jax.eval_shape(lambda a, b: compute(problem, how, a, b), first, second)

        def body(_: Array, carry: tuple[Array, Array]) -> tuple[Array, Array]:
            first, _ = carry
            result = compute(problem, how, first, second)
            nudge = (result[0, 0, 0, 0] * 1e-30).astype(first.dtype)
            return first.at[0, 0, 0, 0].add(nudge), result

        start = (first, jnp.zeros(shape.shape, shape.dtype))
        return lax.fori_loop(0, count, body, start)[1]

    return jax.jit(run)


def _made_up(shape: tuple[int, ...], dtype: str) -> Array:
    """Numbers between -1 and 1, none of them so small that arithmetic slows down."""
    values = np.resize(np.random.default_rng(0).uniform(-1, 1, 4096), shape)
    return jnp.asarray(values, dtype)
