"""Earlier runs as the finished trials with which a study begins."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from pipeline.config.overrides import get_key
from pipeline.config.recipe import Recipe
from pipeline.study.runs.recorded_run import MINOR, RecordedRun, flatten_keys, read_runs

if TYPE_CHECKING:
    from optuna.distributions import BaseDistribution
    from optuna.samplers import BaseSampler
    from optuna.trial import FrozenTrial

    from pipeline.study.sweep.gaussian_process import Acquisition

EARLIER = "earlier_run"
"""Attribute of a trial that is an earlier run; its value is the run's directory."""
FREE_KEYS = ("name", *MINOR, "train.sink", "train.mechanism", "train.feed", "device.", "seed")
"""Prefixes of keys in which an earlier run may differ: they hardly change a result."""
WEIGHT_KEYS = ("checkpoint.restore", "checkpoint.rules", "checkpoint.renames", "checkpoint.partial")
"""Prefixes of keys that decide the initial weights of a run."""
RATE = "train.optimizer.lr"
BATCH_SIZE = "train.batch_size"

ACQUISITIONS: Mapping[str, Acquisition] = {"gp": "ei", "gp-pi": "pi", "gp-ucb": "ucb"}
"""Acquisition of a Gaussian process by the name of its sampler."""
FIRST_DRAWS = 5
"""Trials that a sampler draws at random before it uses results. With tpe's default of 10, a search
of three keys took twice the trials (docs/runs.md)."""
_ELEMENT = re.compile(r"\.\d+(\.|$)")
"""An index of a list, in a dotted key."""


def read_trials(
    folder: Path, recipe: Recipe, space: Mapping[str, BaseDistribution], metric: str
) -> tuple[list[FrozenTrial], int]:
    """Return the runs below a folder as finished trials of a study, and the number of all runs.

    A run becomes a trial if it is done, has the metric and is in the search space. Its recipe may
    differ only in searched keys and `FREE_KEYS`. Raises DataError for a folder without a run.
    """
    runs = read_runs(folder, curves=False)
    recipe_keys = _unscale_rate(flatten_keys(recipe.model_dump(mode="json")), recipe)
    typed = (replace(run, keys=_unscale_rate(run.keys, recipe)) for run in runs)
    candidates = (_make_trial(run, recipe_keys, space, metric) for run in typed)
    return [trial for trial in candidates if trial is not None], len(runs)


def _unscale_rate(keys: Mapping[str, Any], recipe: Recipe) -> Mapping[str, Any]:
    """Return the keys of a run with the learning rate as `recipe` would have it typed.

    Runs record rates after `lr_for_batch` has scaled them.
    """
    rate = keys.get(RATE)
    batch_size = keys.get(BATCH_SIZE)
    if not isinstance(rate, int | float) or not isinstance(batch_size, int) or batch_size < 1:
        return keys
    return {**keys, RATE: recipe.train.optimizer.unscale_rate(rate, batch_size)}


def _make_trial(
    run: RecordedRun,
    recipe_keys: Mapping[str, Any],
    space: Mapping[str, BaseDistribution],
    metric: str,
) -> FrozenTrial | None:
    """Return a run as a trial; None if it doesn't fit the recipe and the search space."""
    value = run.figures.get(metric)
    if run.status != "done" or value is None or not math.isfinite(value):
        return None
    searched = {get_key(name) for name in space}
    keys = [key for key in {**recipe_keys, **run.keys} if not _is_free(key, searched)]
    if any(_differs(run, recipe_keys, key) for key in keys):
        return None
    params = {name: _find_param(run.keys.get(get_key(name)), space[name]) for name in space}
    if any(value is None for value in params.values()):
        return None
    import optuna

    return optuna.create_trial(
        params=params,
        distributions=dict(space),
        value=value,
        user_attrs={EARLIER: str(run.run_dir)},
    )


def _differs(run: RecordedRun, recipe_keys: Mapping[str, Any], key: str) -> bool:
    """Return whether a run has another value of a key than the recipe.

    A key that only the recipe has is newer than the run, which doesn't differ; but an element of a
    list that only the recipe has is a difference.
    """
    if key in run.keys and key in recipe_keys:
        return bool(run.keys[key] != recipe_keys[key])
    return key not in recipe_keys or _ELEMENT.search(key) is not None


def _is_free(key: str, searched: set[str]) -> bool:
    is_searched = any(key == name or key.startswith(f"{name}.") for name in searched)
    return is_searched or (key.startswith(FREE_KEYS) and not key.startswith(WEIGHT_KEYS))


def _find_param(value: Any, distribution: BaseDistribution) -> Any:
    """Return a run's value in the form of the search space; None if it is outside of the space."""
    from optuna.distributions import CategoricalDistribution

    if isinstance(distribution, CategoricalDistribution):
        # Choices are texts from the command line.
        for choice in distribution.choices:
            if _normalize_value(choice) == _normalize_value(value):
                return choice
        return None
    if isinstance(value, bool) or not isinstance(value, int | float):
        return None
    return value if distribution._contains(distribution.to_internal_repr(value)) else None


def _normalize_value(value: Any) -> float | str:
    """Return a value as a number if possible, else as text without spaces and capitals."""
    text = str(value).replace(" ", "").lower()
    try:
        return float(text)
    except ValueError:
        return text


def make_sampler(name: str, seed: int) -> BaseSampler:
    """Return a Gaussian process with one of `ACQUISITIONS`, or Optuna's sampler tpe or random."""
    from optuna.samplers import RandomSampler, TPESampler

    if name in ACQUISITIONS:
        from pipeline.study.sweep.gaussian_process import GaussianProcessSampler

        return GaussianProcessSampler(ACQUISITIONS[name], seed, FIRST_DRAWS)
    if name == "random":
        return RandomSampler(seed)
    return TPESampler(seed=seed, constant_liar=True, n_startup_trials=FIRST_DRAWS)


def suggest_values(
    trials: Sequence[FrozenTrial],
    space: Mapping[str, BaseDistribution],
    count: int,
    *,
    sampler: BaseSampler,
    maximizes: bool,
) -> list[Mapping[str, Any]]:
    """Return values for `count` further runs; the sampler uses the results of `trials`."""
    import optuna

    study = optuna.create_study(direction="maximize" if maximizes else "minimize", sampler=sampler)
    study.add_trials(trials)
    return [dict(study.ask(dict(space)).params) for _ in range(count)]
