"""The stopwatch runs the whole computation, as often as it reports. No test is on its times."""

from __future__ import annotations

from collections.abc import Iterator
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pipeline.models.lowerings.candidates import compute, list_candidates
from pipeline.models.lowerings.problem import ROLES, ConvolutionProblem, Role
from pipeline.models.lowerings.tune import search
from pipeline.models.lowerings.tune.search import MAX_CALLS, ROUND_S, ROUNDS, SHORTEST_S, Stopwatch
from tests.models.lowerings.engines import engines_here, keep_no_programs
from tests.models.lowerings.tune.made_up import PLAIN, convolution

DEVICE = jax.devices("cpu")[0]
TOLERANCE = {"float32": 1e-5, "bfloat16": 0.01}
"""Of the largest value: the program around it may sum in another order."""


@pytest.fixture(autouse=True)
def no_programs_kept() -> Iterator[None]:
    with keep_no_programs():
        yield


def small(role: Role, dtype: str = "float32") -> ConvolutionProblem:
    asked = convolution(role, channels=4, size=6, stride=2)
    return ConvolutionProblem(
        role, asked.window, asked.batch, asked.channels, asked.features, dtype
    )


def operands(problem: ConvolutionProblem) -> list[jax.Array]:
    return [search.make_random_operand(shape, problem.dtype) for shape in problem.operand_shapes]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("role", "dtype"), [*((role, "float32") for role in ROLES), ("weight_grad", "bfloat16")]
)
def test_timing_loop_computes_the_complete_result(role: Role, dtype: str) -> None:
    """All of every result: what nobody reads, a compiler leaves out."""
    problem = small(role, dtype)
    made = operands(problem)
    lowerings = list_candidates(problem, engines_here(dtype))
    assert lowerings
    once = jax.jit(lambda a, b: [compute(problem, lowering, (a, b)) for lowering in lowerings])
    all_expected = compiled(once, *made)(*made)
    for lowering, expected in zip(lowerings, all_expected, strict=True):
        count = np.int32(3)
        run = search.jit_repeated(partial(compute, problem, lowering))
        result = compiled(run, made, count)(made, count)
        assert (result.shape, result.dtype) == (expected.shape, dtype)
        largest = np.abs(np.asarray(expected, np.float32)).max()
        error = np.abs(np.asarray(result, np.float32) - np.asarray(expected, np.float32)).max()
        assert error <= TOLERANCE[dtype] * largest, f"{lowering}: {error}"


def compiled(function: Any, *args: Any) -> Any:
    """Without what only makes it fast: parts are left out, or out of the loop, before that."""
    quick = {"xla_backend_optimization_level": "0"}
    return function.lower(*args).compile(compiler_options=quick)


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_repetitions_depend_on_the_previous_one(dtype: str) -> None:
    """Else one would be enough: with results as large as to be felt, it shows."""

    def double(operands: tuple[jax.Array, ...]) -> jax.Array:
        return operands[0] * jnp.asarray(1e30, operands[0].dtype)

    problem = small("forward", dtype)
    made = operands(problem)
    run = search.jit_repeated(double)
    corners = [float(run(made, np.int32(count))[0, 0, 0, 0]) for count in range(1, 5)]
    np.testing.assert_allclose(np.divide(corners[1:], corners[:-1]), 2, rtol=0.02)


def test_operands_have_the_requested_shapes_and_are_not_too_small() -> None:
    """Numbers below the normal range make arithmetic slow."""
    for problem in (small("forward"), small("weight_grad", "bfloat16")):
        for made, shape in zip(operands(problem), problem.operand_shapes, strict=True):
            values = np.abs(np.asarray(made, np.float32))
            assert (made.shape, made.dtype) == (shape, problem.dtype)
            assert (values.max() <= 1) & (values.min() > 1e-6)
            assert len(np.unique(values)) > 50


@pytest.mark.slow
@pytest.mark.parametrize("role", ROLES)
def test_time_is_positive_microseconds(role: Role) -> None:
    us = Stopwatch(small(role), DEVICE)(PLAIN, float("inf"))
    assert 0 < us < 10e6


class Told(Stopwatch):
    """A stopwatch whose computations take as long as a test says."""

    def __init__(self, *seconds: float) -> None:
        super().__init__(small("forward"), DEVICE)
        self._told = iter(seconds)
        self.counts: list[int] = []

    def _time_loop(self, run: Any, count: int) -> float:
        self.counts.append(count)
        return next(self._told)


def test_slow_candidate_is_timed_once() -> None:
    """After a first call, which may be slow for other reasons."""
    stopwatch = Told(9.0, 1e-3, 4e-3)
    assert stopwatch(PLAIN, 2999.0) == pytest.approx(3000.0)
    assert stopwatch.counts == [1, 0, 1]


def test_time_is_the_minimum_of_rounds_without_overhead() -> None:
    arounds_s, rounds_s = [0.002, 0.004, 0.001, 0.003], [0.05, 0.03, 0.021, 0.04]
    stopwatch = Told(9.0, 0.003, 0.004, 0.003 + ROUND_S / 8, 0.02, *arounds_s, *rounds_s)
    assert stopwatch(PLAIN, float("inf")) == pytest.approx(1e6 * 0.02 / 16)
    assert stopwatch.counts == [1, 0, 1, 4, 16, *[0] * ROUNDS, *[16] * ROUNDS]


def test_candidate_longer_than_a_round_is_run_once_per_round() -> None:
    stopwatch = Told(9.0, 0.0, 10 * ROUND_S, *[0.0] * ROUNDS, *[0.3] * ROUNDS)
    assert stopwatch(PLAIN, float("inf")) == pytest.approx(0.3e6)
    assert stopwatch.counts == [1, 0, 1, *[0] * ROUNDS, *[1] * ROUNDS]


def test_time_below_noise_is_the_shortest_time() -> None:
    stopwatch = Told(9.0, *[0.3] * 100)
    assert stopwatch(PLAIN, float("inf")) == pytest.approx(1e6 * SHORTEST_S)
    assert max(stopwatch.counts) == MAX_CALLS
