"""Exhaustive and genetic search for the fastest candidate."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.core.files.knowledge_bank import Round
from pipeline.models.lowerings.problem.lowering import Lowering

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

    # A generator, since the choice of a child depends on the times of the children before it.
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
