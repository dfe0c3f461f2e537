"""Both strategies on made-up times."""

from __future__ import annotations

from collections.abc import Mapping

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.models.lowerings.problem import Lowering
from pipeline.models.lowerings.tune.search import (
    GENERATIONS,
    HOPELESS,
    POPULATION,
    SearchResult,
    Strategy,
    search,
)

STRATEGIES: tuple[Strategy, ...] = ("exhaustive", "ga")

WAYS = st.builds(
    Lowering,
    st.sampled_from(("convolution", "im2col", "per_tap_matmul", "pointwise")),
    st.sampled_from(("xla", "onednn")),
    st.sampled_from((None, 1, 2, 4, 8, 16, 32, 64)),
)
TIMES_US = st.dictionaries(WAYS, st.floats(0.1, 1e6), min_size=1, max_size=30)
"""Candidates in their order and what each takes."""

SEEDS = st.integers(0, 2**32 - 1)


class Trial:
    """A clock that takes down what was timed and when it was told to give up."""

    def __init__(self, times_us: Mapping[Lowering, float]) -> None:
        self._times_us = times_us
        self.timed: list[Lowering] = []
        self.limits_us: list[float] = []

    def __call__(self, how: Lowering, give_up_us: float) -> float:
        self.timed.append(how)
        self.limits_us.append(give_up_us)
        return self._times_us[how]


def searched(
    times_us: Mapping[Lowering, float], strategy: Strategy, seed: int = 0
) -> tuple[SearchResult, Trial]:
    trial = Trial(times_us)
    return search(list(times_us), trial, strategy, seed), trial


@pytest.mark.medium
@given(TIMES_US, SEEDS)
def test_exhaustive_search_returns_the_fastest(times_us: dict[Lowering, float], seed: int) -> None:
    found, trial = searched(times_us, "exhaustive", seed)
    assert times_us[found.best()] == min(times_us.values())
    assert found.times_us == times_us
    assert trial.timed == list(times_us)
    assert [each.best_us for each in found.rounds] == [min(times_us.values())]


@pytest.mark.medium
@given(TIMES_US, SEEDS)
def test_genetic_search_tries_candidates_once_and_improves(
    times_us: dict[Lowering, float], seed: int
) -> None:
    found, trial = searched(times_us, "ga", seed)
    first = next(iter(times_us))
    assert trial.timed[0] == first
    assert len(trial.timed) == len(set(trial.timed)) <= 1 + POPULATION * GENERATIONS
    assert found.times_us == {lowering: times_us[lowering] for lowering in trial.timed}
    assert times_us[found.best()] <= times_us[first]
    rounds = [each.best_us for each in found.rounds]
    assert len(rounds) == GENERATIONS
    assert list(rounds) == sorted(rounds, reverse=True)
    assert rounds[-1] == times_us[found.best()]


@pytest.mark.slow
@given(TIMES_US, SEEDS)
def test_few_candidates_are_all_tried(times_us: dict[Lowering, float], seed: int) -> None:
    few = dict(list(times_us.items())[:POPULATION])
    found, _ = searched(few, "ga", seed)
    assert times_us[found.best()] == min(few.values())


@pytest.mark.medium
@given(TIMES_US, SEEDS, st.sampled_from(STRATEGIES))
def test_same_seed_tries_the_same_candidates(
    times_us: dict[Lowering, float], seed: int, strategy: Strategy
) -> None:
    one, other = (searched(times_us, strategy, seed) for _ in range(2))
    assert one[0] == other[0]
    assert one[1].timed == other[1].timed


@pytest.mark.slow
@given(TIMES_US, SEEDS, st.sampled_from(STRATEGIES))
def test_candidate_twice_as_slow_as_the_best_is_abandoned(
    times_us: dict[Lowering, float], seed: int, strategy: Strategy
) -> None:
    _, trial = searched(times_us, strategy, seed)
    best_us = float("inf")
    assert trial.timed
    for lowering, limit_us in zip(trial.timed, trial.limits_us, strict=True):
        assert limit_us == HOPELESS * best_us
        best_us = min(best_us, times_us[lowering])


MANY = {
    Lowering(family, engine, images): float(images or 100)
    for family in ("convolution", "im2col", "per_tap_matmul")
    for engine in ("xla", "onednn")
    for images in (None, 1, 2, 4, 8, 16, 32, 64)
}


def test_different_seed_tries_other_candidates() -> None:
    one, other = (searched(MANY, "ga", seed)[1].timed for seed in (1, 2))
    assert one != other


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_best_of_a_subset_is_returned(strategy: Strategy) -> None:
    times_us = {Lowering("convolution"): 9.0, Lowering("convolution", "onednn"): 1.0}
    times_us |= {Lowering("im2col"): 5.0}
    found, _ = searched(times_us, strategy)
    assert found.best() == Lowering("convolution", "onednn")
    assert found.best(lambda lowering: lowering.engine == "xla") == Lowering("im2col")
