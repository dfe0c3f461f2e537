from __future__ import annotations

import re

import numpy as np
import pytest

from pipeline.study.runs.ties import print_ties


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


def test_settings_within_the_noise_are_tied(capsys: pytest.CaptureFixture[str]) -> None:
    print_ties(make_runs({0.1: 1.0, 0.2: 1.001, 0.3: 0.8}, 8), "accuracy")
    text = capsys.readouterr().out
    assert re.fullmatch(
        r"best mean over 8 seeds: lr=0\.[12], [\d.]+; tied with it \(95 %, paired\): lr=0\.[12]\n",
        text,
    )
    assert text.count("lr=0.1") == 1


def test_smallest_loss_can_be_best_without_ties(capsys: pytest.CaptureFixture[str]) -> None:
    print_ties(make_runs({0.1: 1.0, 0.2: 1.2, 0.3: 0.8}, 6), "loss")
    text = capsys.readouterr().out
    assert text.startswith("best mean over 6 seeds: lr=0.3, ")
    assert text.endswith("; all others are worse\n")


def test_ties_require_six_seeds_and_two_settings(capsys: pytest.CaptureFixture[str]) -> None:
    print_ties(make_runs({0.1: 1.0, 0.2: 2.0}, 5), "accuracy")
    print_ties(make_runs({0.1: 1.0}, 9), "accuracy")
    print_ties([], "accuracy")
    assert capsys.readouterr().out == ""


def test_runs_without_a_common_seed_are_tied(capsys: pytest.CaptureFixture[str]) -> None:
    shifted = [({**keys, "seed": keys["seed"] + 100}, v) for keys, v in make_runs({0.2: 2.0}, 6)]
    print_ties([*make_runs({0.1: 1.0}, 6), *shifted], "accuracy")
    assert capsys.readouterr().out.endswith("; tied with it (95 %, paired): lr=0.1\n")
