"""Importance of keys: how much of what good runs have in common each key explains.

By PED-ANOVA (Watanabe, Bansal, Hutter, IJCAI 2023) as Optuna has it, over bootstrap samples of the
runs, since an importance of few runs is mostly noise.
"""

from __future__ import annotations

import importlib.util
import math
import random
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np

from pipeline.study.runs.recorded_run import RecordedRun

LEAST_RUNS = 20
MOST_RUNS = 400
"""Runs of one bootstrap sample at most."""
SAMPLES = 24
"""Bootstrap samples."""
MOST_KEYS = 12
LARGEST = 2**53
"""Largest whole number that floats hold exactly; a key with larger ones has choices."""
WIDE = 30.0
"""Ratio of a key's largest to its smallest value from which it is taken by its logarithm."""


@dataclass(frozen=True)
class KeyImportance:
    """The share of a key, between 0 and 1: the median of bootstrap samples and their range."""

    key: str
    median: float
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""


def importance_of_keys(
    runs: Sequence[RecordedRun], keys: Sequence[str], metric: str, *, larger_is_better: bool
) -> list[KeyImportance] | str:
    """Return the importance of keys for a metric, the largest first, or the reason without any.

    Only runs count that are done and have the metric and all the keys.
    """
    if importlib.util.find_spec("optuna") is None:
        return "needs Optuna: pip install 'recipe-pipeline[sweep]'"
    rated = [
        run
        for run in runs
        if run.status == "done" and math.isfinite(run.figures.get(metric, math.nan))
    ]
    used = [key for key in keys if sum(key in run.keys for run in rated) >= LEAST_RUNS][:MOST_KEYS]
    rated = [run for run in rated if all(key in run.keys for key in used)]
    used = [key for key in used if len({repr(run.keys[key]) for run in rated}) > 1]
    if len(rated) < LEAST_RUNS or not used:
        return (
            f"needs {LEAST_RUNS} runs that are done, have {metric} and the same keys, of which one "
            f"differs; here are {len(rated)}"
        )
    shares = _bootstrap(rated, used, metric, larger_is_better)
    importances = []
    for key in used:
        values = [share[key] for share in shares]
        median, low, high = np.quantile(values, (0.5, 0.1, 0.9), method="nearest").tolist()
        importances.append(KeyImportance(key, median, low, high))
    return sorted(importances, key=lambda importance: -importance.median)


def _bootstrap(
    runs: Sequence[RecordedRun], keys: Sequence[str], metric: str, larger_is_better: bool
) -> list[Mapping[str, float]]:
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    class SampledStudy(optuna.Study):
        """A study whose trials are a sample, which a plain study would copy one by one."""

        sample: Sequence[Any] = ()

        def get_trials(self, deepcopy: bool = True, states: Any = None) -> list[Any]:
            return list(self.sample)

    space = {key: distribution_of([run.keys[key] for run in runs]) for key in keys}
    params = [{key: value_in(space[key], run.keys[key]) for key in keys} for run in runs]

    def make_trial(number: int, index: int) -> optuna.trial.FrozenTrial:
        return optuna.trial.FrozenTrial(
            number=number,
            trial_id=number,
            state=optuna.trial.TrialState.COMPLETE,
            value=runs[index].figures[metric],
            params=params[index],
            distributions=space,
            datetime_start=None,
            datetime_complete=None,
            user_attrs={},
            system_attrs={},
            intermediate_values={},
        )

    generator = random.Random(0)
    direction: Literal["maximize", "minimize"] = "maximize" if larger_is_better else "minimize"
    shares: list[Mapping[str, float]] = []
    before = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = optuna.storages.InMemoryStorage()
        optuna.create_study(storage=storage, study_name=metric, direction=direction)
        study = SampledStudy(metric, storage)
        for _ in range(SAMPLES):
            indices = generator.choices(range(len(runs)), k=min(len(runs), MOST_RUNS))
            study.sample = [make_trial(number, index) for number, index in enumerate(indices)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                evaluator = PedAnovaImportanceEvaluator()
                importances = get_param_importances(study, evaluator=evaluator, params=list(keys))
            finite = {key: share for key, share in importances.items() if math.isfinite(share)}
            shares.append({key: finite.get(key, 0.0) for key in keys})
    finally:
        optuna.logging.set_verbosity(before)
    return shares


def distribution_of(values: Sequence[Any]) -> Any:
    """Return the distribution of Optuna that covers a key's values.

    Numbers have the range that was tried, logarithmic if it is wide; others are choices.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    if len(numbers) < len(values) or any(
        isinstance(number, float) and not math.isfinite(number) for number in numbers
    ):
        return CategoricalDistribution(list(dict.fromkeys(map(_choice, values))))
    if max(map(abs, numbers)) > LARGEST:
        return CategoricalDistribution(list(dict.fromkeys(map(str, values))))
    low = min(numbers)
    high = max(numbers)
    log = low > 0 and high / low >= WIDE
    if all(isinstance(number, int) for number in numbers):
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(float(low), float(high), log=log)


def value_in(distribution: Any, value: Any) -> Any:
    """Return a key's value as a distribution of `distribution_of` holds it."""
    if not hasattr(distribution, "choices"):
        return value
    choice = _choice(value)
    return choice if choice in distribution.choices else str(value)


def _choice(value: Any) -> Any:
    return value if value is None or isinstance(value, bool | int | float | str) else str(value)
