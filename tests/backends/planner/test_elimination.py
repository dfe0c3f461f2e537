"""Elimination against all assignments of random sums of tables."""

from __future__ import annotations

import numpy as np
import pytest
from numpy.typing import NDArray

from pipeline.backends.planner.elimination import Choice, Eliminator, Factor, Table, find_fastest
from tests.slow_cases import mark_slow_except

Arrays = tuple[NDArray[np.float64], NDArray[np.float64]]


def random_factors(rng: np.random.Generator) -> tuple[list[Factor], list[int]]:
    """A chain of up to 8 variables with residual edges; repeated blocks share their tables."""
    count = int(rng.integers(1, 9))
    states = int(rng.integers(2, 5))
    sizes = [states] * count
    tables = {
        rank: [
            Table.from_arrays(
                rng.integers(0, 50, (states,) * rank), rng.integers(0, 20, (states,) * rank)
            )
            for _ in range(3)
        ]
        for rank in (1, 2, 3)
    }
    scopes = [(i,) for i in range(count)] + [(i, i + 1) for i in range(count - 1)]
    for _ in range(int(rng.integers(0, 4))):
        length = min(count, int(rng.integers(2, 4)))
        scopes.append(tuple(sorted(map(int, rng.choice(count, length, replace=False)))))
    pick = rng.integers(0, 3, len(scopes))
    return [Factor(s, tables[len(s)][p]) for s, p in zip(scopes, pick, strict=True)], sizes


def totals(factors: list[Factor], sizes: list[int]) -> Arrays:
    """Time and memory of every assignment."""
    time, memory = np.zeros(sizes), np.zeros(sizes)
    for factor in factors:
        shape = [size if v in factor.scope else 1 for v, size in enumerate(sizes)]
        time += factor.table.time.reshape(shape)
        memory += factor.table.memory.reshape(shape)
    return time, memory


def costs_what_it_says(choice: Choice, every: Arrays) -> bool:
    place = tuple(choice.states[v] for v in range(len(choice.states)))
    return (every[0][place], every[1][place]) == (choice.time, choice.memory)


@pytest.mark.medium
@pytest.mark.parametrize("seed", mark_slow_except(range(40), range(200)))
def test_elimination_finds_the_best_assignment(seed: int) -> None:
    factors, sizes = random_factors(np.random.default_rng(seed))
    every = time, memory = totals(factors, sizes)
    best = Eliminator().find_best(factors, sizes)
    assert best is not None
    assert best.time == time.min()
    assert costs_what_it_says(best, every)
    bound = float(np.quantile(memory, 0.05))
    bounded = find_fastest(factors, sizes, bound, 4096)
    assert bounded is not None
    assert bounded.time == time[memory <= bound].min()
    assert costs_what_it_says(bounded, every)
    # With few points the best may be missed, but not the bound.
    rough = find_fastest(factors, sizes, bound, 3)
    assert rough is not None
    assert rough.memory <= bound
    assert costs_what_it_says(rough, every)
    assert find_fastest(factors, sizes, memory.min() - 1, 8) is None


def test_equal_blocks_are_computed_once() -> None:
    rng = np.random.default_rng(0)
    one, two = Table.from_arrays(rng.random(4)), Table.from_arrays(rng.random((4, 4)))
    spokes = 50  # around one hub, as the layers of a residual stream
    factors = [Factor((v,), one) for v in range(1 + spokes)]
    factors += [Factor((0, v), two) for v in range(1, 1 + spokes)]
    eliminator = Eliminator()
    assert eliminator.find_best(factors, [4] * (1 + spokes)) is not None
    assert len(eliminator._cache) < 2 * spokes
    hub = one.time[:, 0] + spokes * (two.time[..., 0] + one.time[:, 0]).min(1)
    best = eliminator.find_best(factors, [4] * (1 + spokes))
    assert best is not None
    assert best.time == pytest.approx(hub.min())


def test_ties_in_time_are_broken_by_memory() -> None:
    table = Table.from_arrays([1.0, 1.0, 2.0], [5.0, 3.0, 0.0])
    best = Eliminator().find_best([Factor((0,), table)], [3])
    assert best is not None
    assert best.states == {0: 1}
