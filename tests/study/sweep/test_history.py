"""The Gaussian process that chooses trials (I-03): its formulas, and what it finds."""

from __future__ import annotations

import math
import statistics
import subprocess
import sys
from typing import Any, get_args

import numpy as np
import optuna
import pytest
from scipy import integrate, stats

from pipeline.study.sweep.history import (
    UCB_DEVIATIONS,
    Acquisition,
    GaussianProcessSampler,
    _find_param,
    acquire,
    predict,
)

ACQUISITIONS: tuple[Acquisition, ...] = get_args(Acquisition)


def test_acquisitions_match_their_integrals() -> None:
    mean, std, best = 0.3, 0.7, 0.5
    density = stats.norm(mean, std).pdf
    improvement = integrate.quad(lambda y: (y - best) * density(y), best, 20)[0]
    probability = integrate.quad(density, best, 20)[0]
    expected = {"ei": improvement, "pi": probability, "ucb": mean + UCB_DEVIATIONS * std}
    for name in ACQUISITIONS:
        found = acquire(name, np.array([mean]), np.array([std]), best)
        assert found[0] == pytest.approx(expected[name], rel=1e-6)


def test_predictions_interpolate_and_are_uncertain_far_away() -> None:
    x = np.array([[0.0], [0.2], [0.5], [0.9]])
    y = np.sin(5 * x[:, 0])
    mean, std = predict(x, y, np.concatenate([x, [[0.35], [50.0]]]))
    np.testing.assert_allclose(mean[:4], y, atol=0.01)
    assert mean[4] == pytest.approx(math.sin(1.75), abs=0.1)
    assert (abs(mean[5]), std[5]) == (pytest.approx(0, abs=1e-6), pytest.approx(1, abs=1e-6))
    assert std[:4].max() < std[4] < std[5]


def search(sampler: optuna.samplers.BaseSampler, trials: int, direction: str) -> float:
    """The best value of a function of three keys, which is 1 at a=0.02, b=7, c=x."""
    study = optuna.create_study(direction=direction, sampler=sampler)

    def value(trial: optuna.Trial) -> float:
        a = trial.suggest_float("a", 1e-4, 1, log=True)
        b = trial.suggest_int("b", 1, 20)
        c = trial.suggest_categorical("c", ["x", "y", "z"])
        quality = 1 - math.log10(a / 0.02) ** 2 / 4 - (b - 7) ** 2 / 100 - 0.3 * (c != "x")
        return quality if direction == "maximize" else -quality

    study.optimize(value, n_trials=trials)
    return study.best_value if direction == "maximize" else -study.best_value


@pytest.mark.slow
@pytest.mark.parametrize("acquisition", ACQUISITIONS)
def test_search_finds_more_than_random_draws(acquisition: Acquisition) -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    found = [
        search(GaussianProcessSampler(acquisition, seed), 20, direction)
        for seed, direction in enumerate(("maximize", "minimize", "maximize"))
    ]
    drawn = [search(optuna.samplers.RandomSampler(seed), 20, "maximize") for seed in range(9)]
    assert statistics.median(found) > max(0.97, statistics.median(drawn))


@pytest.mark.medium
@pytest.mark.parametrize(("direction", "sign"), [("maximize", 1), ("minimize", -1)])
@pytest.mark.parametrize("acquisition", ACQUISITIONS)
def test_best_of_either_direction_is_sought(
    acquisition: Acquisition, direction: str, sign: int
) -> None:
    """I-03."""
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space: dict[str, Any] = {"a": optuna.distributions.FloatDistribution(0, 1)}
    study = optuna.create_study(
        sampler=GaussianProcessSampler(acquisition, seed=3), direction=direction
    )
    for a in (0.0, 0.1, 0.6, 0.7, 0.9, 1.0):
        value = -sign * (a - 0.4) ** 2
        study.add_trial(optuna.create_trial(params={"a": a}, distributions=space, value=value))
    assert abs(study.ask(space).params["a"] - 0.4) < 0.2


@pytest.mark.medium
def test_concurrent_trials_differ_and_are_reproducible_by_seed() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    space: dict[str, Any] = {"a": optuna.distributions.FloatDistribution(0, 1)}
    asked = []
    for _ in range(2):
        study = optuna.create_study(sampler=GaussianProcessSampler(seed=3), direction="maximize")
        study.add_trials(
            [
                optuna.create_trial(params={"a": a}, distributions=space, value=-((a - 0.4) ** 2))
                for a in (0.0, 0.1, 0.6, 0.7, 0.9, 1.0)
            ]
        )
        asked.append([study.ask(space).params["a"] for _ in range(3)])
    assert asked[0] == asked[1]
    assert abs(asked[0][0] - 0.4) < 0.15
    assert len(set(asked[0])) == 3


def test_equal_values_infinity_and_single_choice_are_accepted() -> None:
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    study = optuna.create_study(sampler=GaussianProcessSampler(seed=1, n_startup_trials=1))
    space = {
        "a": optuna.distributions.FloatDistribution(0, 1),
        "b": optuna.distributions.CategoricalDistribution(["only"]),
    }
    for value in (0.5, float("inf"), 0.5, 0.5, 0.5):
        study.tell(study.ask(space), value)
    assert all(trial.params["b"] == "only" for trial in study.trials)


@pytest.mark.slow
def test_sampler_option_loads_without_torch() -> None:
    code = (
        "import sys, yaml; from hydra.utils import instantiate;"
        "from pipeline.core.files.paths import CONF;"
        "file = CONF / 'hydra' / 'sweeper' / 'sampler' / 'gp.yaml';"
        "made = instantiate(yaml.safe_load(file.read_text()));"
        "print(type(made).__name__, 'torch' in sys.modules)"
    )
    out = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert out.stdout.split() == ["GaussianProcessSampler", "False"]


def test_earlier_run_with_null_has_the_choice_null() -> None:
    choices = optuna.distributions.CategoricalDistribution(["null", "1.0", "True"])
    assert [_find_param(value, choices) for value in (None, 1, True)] == ["null", "1.0", "True"]
    assert _find_param(2, choices) is None
