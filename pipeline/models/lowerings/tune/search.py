"""Search for the fastest candidate: exhaustive, or genetic."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.core.files.knowledge_bank import Round
from pipeline.models.lowerings.problem.lowering import Lowering

Mode = Literal["off", "bank", "tune", "repeat"]
"""off: defaults only; bank: banks, else the rule; tune: also tune what is in no bank; repeat: tune
everything."""

Strategy = Literal["exhaustive", "ga"]
POPULATION = 6
GENERATIONS = 3
ELITE = 2
HOPELESS = 2.0
"""A candidate with this multiple of the best time is timed only once."""

Clock = Callable[[Lowering, float], float]
"""(lowering, microseconds at which to give up) -> microseconds."""


@dataclass(frozen=True)
class SearchResult:
    """Times of the candidates that were tried, in microseconds, and the best after every round."""

    times_us: dict[Lowering, float]
    rounds: tuple[Round, ...]

    def best(self, among: Callable[[Lowering], bool] = lambda _: True) -> Lowering:
        """The fastest of the candidates for which `among` is true."""
        return min(filter(among, self.times_us), key=self.times_us.__getitem__)


def search(
    candidates: Sequence[Lowering], clock: Clock, strategy: Strategy, seed: int
) -> SearchResult:
    """Time candidates. Every strategy times the first, which is the one to beat."""
    trials = _Trials(clock)
    trials.time(candidates[:1])
    if strategy == "exhaustive":
        trials.time(candidates)
        trials.end_round()
    else:
        _search_genetically(candidates, trials, np.random.default_rng(seed))
    return SearchResult(trials.times_us, tuple(trials.rounds))


class _Trials:
    """Times of the candidates, each timed once."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock
        self.times_us: dict[Lowering, float] = {}
        self.rounds: list[Round] = []

    def time(self, candidates: Sequence[Lowering]) -> None:
        for candidate in candidates:
            if candidate not in self.times_us:
                best_us = min(self.times_us.values(), default=float("inf"))
                self.times_us[candidate] = self._clock(candidate, HOPELESS * best_us)

    def end_round(self) -> None:
        self.rounds.append(Round(min(self.times_us.values())))


def _search_genetically(
    candidates: Sequence[Lowering], trials: _Trials, generator: np.random.Generator
) -> None:
    """Time generations of candidates; genes (family, engine, images) come from two of the best."""
    count = min(POPULATION, len(candidates))
    picked = generator.choice(len(candidates), count, replace=False)
    trials.time([candidates[i] for i in picked])
    trials.end_round()
    for _ in range(GENERATIONS - 1):
        elite = sorted(trials.times_us, key=trials.times_us.__getitem__)[:ELITE]
        for _ in range(count):
            untimed = [lowering for lowering in candidates if lowering not in trials.times_us]
            if untimed:
                trials.time([_child(elite, untimed, generator)])
        trials.end_round()


def _child(
    elite: Sequence[Lowering], candidates: Sequence[Lowering], generator: np.random.Generator
) -> Lowering:
    """The candidate nearest to mixed genes of two parents, one of them from another candidate."""
    mother, father = (elite[int(generator.integers(len(elite)))] for _ in range(2))
    stranger = candidates[int(generator.integers(len(candidates)))]
    mutant = int(generator.integers(3))
    genes = [
        other if position == mutant else (a if generator.random() < 0.5 else b)
        for position, (a, b, other) in enumerate(
            zip(_genes(mother), _genes(father), _genes(stranger), strict=True)
        )
    ]

    def agreement(lowering: Lowering) -> int:
        return sum(a == b for a, b in zip(_genes(lowering), genes, strict=True))

    return max(candidates, key=agreement)


def _genes(lowering: Lowering) -> tuple[str, str, int | None]:
    return lowering.family, lowering.engine, lowering.images
