"""Importance of keys: how much each key decides whether a run is good.

It is computed by Optuna's PED-ANOVA (Watanabe, Bansal, Hutter, IJCAI 2023) over bootstrap samples
of the runs, since an importance from few runs is mostly noise.
"""

from __future__ import annotations

import importlib.util
import math
import random
import warnings
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from pipeline.study.runs.ranking import is_larger_better
from pipeline.study.runs.recorded_run import RecordedRun

MIN_RUNS = 20
"""Least number of runs: an importance from fewer is mostly noise."""
MAX_SAMPLE_RUNS = 400
"""A bootstrap sample has at most this many runs."""
BOOTSTRAP_SAMPLES = 24
MAX_KEYS = 12
"""At most this many keys are compared, the first of `keys`."""
MAX_EXACT_INTEGER = 2**53
"""Largest whole number that floats represent exactly; larger numbers are treated as choices."""
MIN_LOG_RATIO = 30.0
"""Ratio of a key's largest to its smallest value from which the key has a logarithmic scale."""


@dataclass(frozen=True)
class KeyImportance:
    """Importance of a key from 0 to 1, over the bootstrap samples."""

    key: str
    median: float
    low: float
    """10th percentile."""
    high: float
    """90th percentile."""


def compute_importances(
    runs: Sequence[RecordedRun], keys: Sequence[str], metric: str
) -> list[KeyImportance] | str:
    """Return the importance of keys for a metric, the largest first, or the reason for none.

    Only runs that are done and have the metric and the keys are used.
    """
    if importlib.util.find_spec("optuna") is None:
        return "needs Optuna: pip install 'recipe-pipeline[sweep]'"
    done = [run for run in runs if run.status == "done"]
    rated_runs = [run for run in done if math.isfinite(run.figures.get(metric, math.nan))]
    counts = Counter(key for run in rated_runs for key in run.keys)
    compared_keys = [key for key in keys if counts[key] >= MIN_RUNS][:MAX_KEYS]
    rated_runs = [run for run in rated_runs if all(key in run.keys for key in compared_keys)]
    compared_keys = [
        key for key in compared_keys if len({repr(run.keys[key]) for run in rated_runs}) > 1
    ]
    if len(rated_runs) < MIN_RUNS or not compared_keys:
        return (
            f"needs {MIN_RUNS} runs that are done, have {metric} and the same keys, and differ in "
            f"a key; has {len(rated_runs)}"
        )
    samples = _bootstrap_importances(rated_runs, compared_keys, metric)
    importances = []
    for key in compared_keys:
        values = [sample[key] for sample in samples]
        median, low, high = np.quantile(values, (0.5, 0.1, 0.9), method="nearest").tolist()
        importances.append(KeyImportance(key, median, low, high))
    return sorted(importances, key=lambda importance: -importance.median)


def _bootstrap_importances(
    runs: Sequence[RecordedRun], keys: Sequence[str], metric: str
) -> list[Mapping[str, float]]:
    """Return the importance of each key in each bootstrap sample; 0 if it isn't finite."""
    import optuna
    from optuna.importance import PedAnovaImportanceEvaluator, get_param_importances

    class SampledStudy(optuna.Study):
        """A study with sampled trials, which an ordinary study would copy one by one."""

        sample: Sequence[Any] = ()

        def get_trials(self, deepcopy: bool = True, states: Any = None) -> list[Any]:
            return list(self.sample)

    space = {key: choose_distribution([run.keys[key] for run in runs]) for key in keys}
    params = [{key: to_param(space[key], run.keys[key]) for key in keys} for run in runs]

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
    samples: list[Mapping[str, float]] = []
    verbosity = optuna.logging.get_verbosity()
    optuna.logging.set_verbosity(optuna.logging.ERROR)
    try:
        storage = optuna.storages.InMemoryStorage()
        optuna.create_study(
            storage=storage,
            study_name=metric,
            direction="maximize" if is_larger_better(metric) else "minimize",
        )
        study = SampledStudy(metric, storage)
        for _ in range(BOOTSTRAP_SAMPLES):
            indices = generator.choices(range(len(runs)), k=min(len(runs), MAX_SAMPLE_RUNS))
            study.sample = [make_trial(number, index) for number, index in enumerate(indices)]
            with warnings.catch_warnings():
                warnings.simplefilter("ignore")
                evaluator = PedAnovaImportanceEvaluator()
                importances = get_param_importances(study, evaluator=evaluator, params=list(keys))
            finite = {key: value for key, value in importances.items() if math.isfinite(value)}
            samples.append({key: finite.get(key, 0.0) for key in keys})
    finally:
        optuna.logging.set_verbosity(verbosity)
    return samples


def choose_distribution(values: Sequence[Any]) -> Any:
    """Return Optuna's distribution for a key's values.

    Numbers have their range, on a logarithmic scale if it is wide. Other values are choices.
    """
    from optuna.distributions import CategoricalDistribution, FloatDistribution, IntDistribution

    numbers = [v for v in values if isinstance(v, int | float) and not isinstance(v, bool)]
    has_infinite = any(isinstance(v, float) and not math.isfinite(v) for v in numbers)
    if len(numbers) < len(values) or has_infinite:
        return CategoricalDistribution(list(dict.fromkeys(values)))
    if max(map(abs, numbers)) > MAX_EXACT_INTEGER:
        return CategoricalDistribution(list(dict.fromkeys(map(str, values))))
    low = min(numbers)
    high = max(numbers)
    log = low > 0 and high / low >= MIN_LOG_RATIO
    if all(isinstance(number, int) for number in numbers):
        return IntDistribution(int(low), int(high), log=log)
    return FloatDistribution(float(low), float(high), log=log)


def to_param(distribution: Any, value: Any) -> Any:
    """Return a key's value in the form that `distribution`, by `choose_distribution`, expects."""
    is_range = not hasattr(distribution, "choices")
    return value if is_range or value in distribution.choices else str(value)
