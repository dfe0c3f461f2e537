"""The metric that runs are ranked by, and its direction."""

from __future__ import annotations

import re

import numpy as np
import pytest

from pipeline.study.runs.ranking import is_larger_better, main_metric, print_ties

LOSS = {"train_loss": 0.1, "steps": 9.0, "step_ms": 2.0}
EVALUATED = {**LOSS, "accuracy": 0.9, "loss": 0.3, "f1": 0.9, "train_accuracy": 1.0}


def test_accuracy_is_preferred_to_a_more_frequent_loss() -> None:
    assert main_metric([EVALUATED, LOSS, LOSS, LOSS]) == "accuracy"
    assert main_metric([LOSS, {**LOSS, "loss": 0.3}, LOSS]) == "loss"
    assert main_metric([LOSS, LOSS]) == "train_loss"


def test_more_frequent_metric_is_preferred_to_accuracy() -> None:
    numbers = {**LOSS, "loss": 0.3, "rmse": 0.5}
    assert main_metric([EVALUATED, numbers, numbers]) == "rmse"


def test_speeds_are_not_metrics() -> None:
    assert main_metric([{"step_ms": 2.0, "steps": 9.0, "parameters": 7.0}]) is None
    assert main_metric([]) is None


@pytest.mark.parametrize(
    ("figure", "larger"),
    [
        ("accuracy", True),
        ("loss", False),
        ("train_loss", False),
        ("rmse", False),
        ("steps", True),
        ("median_step_ms", False),
    ],
)
def test_directions_of_metrics_are_defined(figure: str, larger: bool) -> None:
    assert is_larger_better(figure) is larger


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


def move_seeds(
    runs: list[tuple[dict[str, float], float]], distance: int
) -> list[tuple[dict[str, float], float]]:
    return [({**keys, "seed": keys["seed"] + distance}, value) for keys, value in runs]


def test_runs_without_a_common_seed_are_not_compared(capsys: pytest.CaptureFixture[str]) -> None:
    print_ties([*make_runs({0.1: 1.0}, 6), *move_seeds(make_runs({0.2: 2.0}, 6), 100)], "accuracy")
    assert capsys.readouterr().out.endswith("; no other has its seeds\n")


def test_settings_with_few_common_seeds_are_named(capsys: pytest.CaptureFixture[str]) -> None:
    others = move_seeds(make_runs({0.3: 1.0}, 6), 1)
    print_ties([*make_runs({0.1: 0.0, 0.2: 2.0}, 6), *others], "accuracy")
    text = capsys.readouterr().out
    assert text.endswith("; not compared, for fewer than 6 equal seeds: lr=0.3\n")


def test_private_runs_are_not_ranked_by_epsilon() -> None:
    private = {"loss": 0.1, "train_loss": 0.2, "epsilon": 3.0}
    assert main_metric([private]) == "loss"
    assert main_metric([{**private, "accuracy": 0.9}, private]) == "accuracy"
    assert not is_larger_better("epsilon")
