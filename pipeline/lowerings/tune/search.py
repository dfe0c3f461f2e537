"""Which of the candidates is fastest: by trying all of them, or by breeding the better ones."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np

from pipeline.files.knowledge_bank import Round
from pipeline.lowerings.problem.lowering import Lowering

Mode = Literal["off", "bank", "tune", "repeat"]
"""Defaults only; what a bank has, else the rule; also tune what no bank has; tune everything."""

Strategy = Literal["exhaustive", "ga"]
POPULATION, GENERATIONS, ELITE = 6, 3, 2
HOPELESS = 2.0
"""A candidate that takes so many times as long as the best is timed only once."""

Clock = Callable[[Lowering, float], float]
"""(lowering, microseconds at which to give up) -> microseconds."""


@dataclass(frozen=True)
class Search:
    """Times of what was tried, in microseconds, and the best so far after every round."""

    times_us: dict[Lowering, float]
    rounds: tuple[Round, ...]

    def best(self, among: Callable[[Lowering], bool] = lambda _: True) -> Lowering:
        """The fastest of those."""
        return min(filter(among, self.times_us), key=self.times_us.__getitem__)


def search(candidates: Sequence[Lowering], clock: Clock, strategy: Strategy, seed: int) -> Search:
    """Time candidates; the first is among them whatever the strategy, as the one to beat."""
    trial = _Trial(clock)
    trial.time(candidates[:1])
    if strategy == "exhaustive":
        trial.time(candidates)
        trial.end_round()
    else:
        _breed(candidates, trial, np.random.default_rng(seed))
    return Search(trial.times_us, tuple(trial.rounds))


class _Trial:
    """What was timed, each candidate once."""

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


def _breed(candidates: Sequence[Lowering], trial: _Trial, generator: np.random.Generator) -> None:
    """Generations of candidates whose genes (family, engine, images) come from two of the best."""
    count = min(POPULATION, len(candidates))
    picked = generator.choice(len(candidates), count, replace=False)
    trial.time([candidates[i] for i in picked])
    trial.end_round()
    for _ in range(GENERATIONS - 1):
        elite = sorted(trial.times_us, key=trial.times_us.__getitem__)[:ELITE]
        for _ in range(count):
            untimed = [way for way in candidates if way not in trial.times_us]
            if untimed:
                trial.time([_child(elite, untimed, generator)])
        trial.end_round()


def _child(
    elite: Sequence[Lowering], candidates: Sequence[Lowering], generator: np.random.Generator
) -> Lowering:
    """Genes of two parents mixed, one of them replaced by another's: the nearest candidate."""
    mother, father = (elite[int(generator.integers(len(elite)))] for _ in range(2))
    stranger = candidates[int(generator.integers(len(candidates)))]
    mutant = int(generator.integers(3))
    genes = [
        other if position == mutant else (a if generator.random() < 0.5 else b)
        for position, (a, b, other) in enumerate(
            zip(_genes(mother), _genes(father), _genes(stranger), strict=True)
        )
    ]
    return max(candidates, key=lambda way: _agreement(_genes(way), genes))


def _agreement(genes: Sequence[object], wanted: Sequence[object]) -> int:
    return sum(a == b for a, b in zip(genes, wanted, strict=True))


def _genes(way: Lowering) -> tuple[str, str, int | None]:
    return way.family, way.engine, way.images
