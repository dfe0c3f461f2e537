from __future__ import annotations

import numpy as np

from pipeline.study.runs.ties import find_ties


def make_runs(means: dict[float, float], seeds: int) -> list[tuple[dict[str, float], float]]:
    """Return runs by rate and seed; what the seed decides is common to all rates."""
    rng = np.random.default_rng(1)
    common = rng.normal(size=seeds)
    noise = {rate: 0.01 * rng.normal(size=seeds) for rate in means}
    return [
        ({"lr": rate, "seed": seed}, mean + common[seed] + noise[rate][seed])
        for rate, mean in means.items()
        for seed in range(seeds)
    ]


def test_settings_within_the_noise_are_tied() -> None:
    runs = make_runs({0.1: 1.0, 0.2: 1.001, 0.3: 0.8}, 8)
    ties = find_ties(runs, larger_is_better=True)
    assert ties is not None
    assert {ties.best, *ties.tied} == {"lr=0.1", "lr=0.2"}
    assert str(ties).startswith(f"best mean over 8 seeds: {ties.best}, ")
    assert str(ties).endswith(f"; tied with it (95 %, paired): {ties.tied[0]}")


def test_smallest_loss_can_be_best_without_ties() -> None:
    ties = find_ties(make_runs({0.1: 1.0, 0.2: 1.2, 0.3: 0.8}, 6), larger_is_better=False)
    assert ties is not None
    assert ties.best == "lr=0.3"
    assert str(ties).endswith("; all others are worse")


def test_ties_require_six_seeds_and_two_settings() -> None:
    assert find_ties(make_runs({0.1: 1.0, 0.2: 2.0}, 5), larger_is_better=True) is None
    assert find_ties(make_runs({0.1: 1.0}, 9), larger_is_better=True) is None
    assert find_ties([], larger_is_better=True) is None


def test_runs_without_a_common_seed_are_tied() -> None:
    shifted = [({**keys, "seed": keys["seed"] + 100}, v) for keys, v in make_runs({0.2: 2.0}, 6)]
    ties = find_ties([*make_runs({0.1: 1.0}, 6), *shifted], larger_is_better=True)
    assert ties is not None
    assert ties.tied == ("lr=0.1",)
