"""Exhaustive and genetic search for the fastest candidate, and the time of a candidate.

A computation is timed in the body of a loop, as in a sink.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import Array, lax
from jax.experimental.xla_metadata import set_xla_metadata

from pipeline.core.files.knowledge_bank import Round
from pipeline.core.host.jax_private import keep_from_cache
from pipeline.models.lowerings.candidates import compute
from pipeline.models.lowerings.formulas.matmuls import as_bits, from_bits
from pipeline.models.lowerings.problem import Lowering, Problem

Mode = Literal["off", "bank", "tune", "repeat"]
"""off: only defaults; bank: results of banks, else a choice by a rule (`rule.py`); tune: problems
in no bank are tuned; repeat: all problems are tuned."""

Strategy = Literal["exhaustive", "ga"]
POPULATION = 6
GENERATIONS = 3
ELITE = 2
"""Numbers of candidates in a generation of the genetic search, of generations, and of parents."""
HOPELESS = 2.0
"""A candidate isn't timed again if its first time is this multiple of the best time."""

Clock = Callable[[Lowering, float], float]
"""(lowering, microseconds at which to give up) -> microseconds."""
ROUNDS = 4
ROUND_S = 0.02
"""Longest time of a round in seconds, unless a single call is longer. A round takes at least a
quarter of it, unless `MAX_CALLS` calls are shorter."""
CALLS_FACTOR = 4
MAX_CALLS = 4096
"""Factor by which the calls of a round grow until it is long enough, and the most calls."""

SHORTEST_S = 1e-8
"""Least time that is returned, since a noisy difference may be 0 or less."""


@dataclass(frozen=True)
class SearchResult:
    """Times of the timed candidates, in microseconds, and the best time after every round."""

    times_us: dict[Lowering, float]
    rounds: tuple[Round, ...]

    def best(self, among: Callable[[Lowering], bool] = lambda _: True) -> Lowering:
        """Return the fastest of the candidates for which `among` is true."""
        return min(filter(among, self.times_us), key=self.times_us.__getitem__)


def search(
    candidates: Sequence[Lowering], clock: Clock, strategy: Strategy, seed: int
) -> SearchResult:
    """Time candidates, each at most once. The first candidate, the default, is always timed."""
    times_us: dict[Lowering, float] = {}
    rounds = []

    def time_new(generation: Iterable[Lowering]) -> None:
        for candidate in generation:
            if candidate not in times_us:
                best_us = min(times_us.values(), default=float("inf"))
                times_us[candidate] = clock(candidate, HOPELESS * best_us)

    generations: Iterable[Iterable[Lowering]] = [candidates]
    if strategy == "ga":
        generations = _breed_generations(candidates, times_us, np.random.default_rng(seed))
    time_new(candidates[:1])
    for generation in generations:
        time_new(generation)
        rounds.append(Round(min(times_us.values())))
    return SearchResult(times_us, tuple(rounds))


def _breed_generations(
    candidates: Sequence[Lowering],
    times_us: Mapping[Lowering, float],
    generator: np.random.Generator,
) -> Iterator[Iterable[Lowering]]:
    """Yield generations of candidates; genes (family, engine, images) are from two of the best.
    `times_us` must have the times of all candidates of earlier generations."""
    count = min(POPULATION, len(candidates))
    yield [candidates[i] for i in generator.choice(len(candidates), count, replace=False)]

    # Children are bred one by one, since a choice depends on the times of the children before it.
    def breed_children(elite: Sequence[Lowering]) -> Iterator[Lowering]:
        for _ in range(count):
            untimed = [lowering for lowering in candidates if lowering not in times_us]
            if untimed:
                yield _breed_child(elite, untimed, generator)

    for _ in range(GENERATIONS - 1):
        yield breed_children(sorted(times_us, key=times_us.__getitem__)[:ELITE])


def _breed_child(
    elite: Sequence[Lowering], candidates: Sequence[Lowering], generator: np.random.Generator
) -> Lowering:
    """Return the candidate nearest to mixed genes of two parents, with one gene of a stranger."""
    mother, father = (elite[int(generator.integers(len(elite)))] for _ in range(2))
    stranger = candidates[int(generator.integers(len(candidates)))]
    mutant = int(generator.integers(3))
    genes: list[str | int | None] = []
    parents = zip(_list_genes(mother), _list_genes(father), strict=True)
    for position, (from_mother, from_father) in enumerate(parents):
        if position == mutant:
            genes.append(_list_genes(stranger)[position])
        else:
            genes.append(from_mother if generator.random() < 0.5 else from_father)

    def count_common_genes(lowering: Lowering) -> int:
        return sum(a == b for a, b in zip(_list_genes(lowering), genes, strict=True))

    return max(candidates, key=count_common_genes)


def _list_genes(lowering: Lowering) -> tuple[str, str, int | None]:
    return lowering.family, lowering.engine, lowering.images


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
        with keep_from_cache():
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
