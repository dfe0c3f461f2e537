"""Page of all runs: one HTML file that contains data, style and script, and needs no server.

It shows the data and the earlier runs from which runs, checkpoints and exports come.
"""

from __future__ import annotations

import importlib.util
import math
import os
import random
import warnings
from collections import Counter
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from pipeline.core.errors import shorten
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.pages.page import Page, render_page
from pipeline.study.runs.ranking import is_larger_better
from pipeline.study.runs.recorded_run import RecordedRun, find_common_keys, list_differing_keys

REPRODUCED = "_reproduced"
"""Suffix of the name of a run by `python -m pipeline reproduce`."""


@dataclass(frozen=True)
class Link:
    """A relation between two runs, or a run and a file."""

    source: str
    """Name of a run in the folder, or a path."""
    relation: str
    """Relation, such as `gave its weights to`, `was resumed` or `was exported as`."""
    target: str
    """Name of a run in the folder, or a path; the step for a run that was resumed."""


@dataclass(frozen=True)
class DataUse:
    """The runs that use the same data with the same map ops."""

    dataset: str
    fingerprint: str
    """Value of `RecordedRun.data`."""
    ops: str
    """Names of the map ops of the training split, in their order."""
    runs: tuple[str, ...]


def list_links(runs: Sequence[RecordedRun]) -> list[Link]:
    """Return the links of runs to their sources and exports, in the order of the runs."""
    recorded_paths = {os.path.abspath(descendant.to) for run in runs for descendant in run.made}
    folders = {os.path.abspath(run.run_dir): run for run in runs}
    return [link for run in runs for link in _list_links(run, folders, recorded_paths)]


def _list_links(
    run: RecordedRun, folders: Mapping[str, RecordedRun], recorded_paths: Collection[str]
) -> Iterator[Link]:
    """Yield the links of a run; `recorded_paths` are in the records of the runs that they use."""
    for relation, source in run.sources.items():
        if relation == "resumed":
            yield Link(run.name, "was resumed", source)
        else:
            yield Link(_name_run(source, folders), "gave its weights to", run.name)
    for descendant in run.made:
        yield Link(run.name, f"was {descendant.made} as", _name_run(descendant.to, folders))
    if run.name.endswith(REPRODUCED) and os.path.abspath(run.run_dir) not in recorded_paths:
        # The folder is named TIME_RECIPE_reproduced.
        folder = run.name.rpartition("/")[2]
        recipe = folder.partition("_")[2].removesuffix(REPRODUCED)
        yield Link(recipe, "was repeated by", run.name)


def _name_run(path: str, folders: Mapping[str, RecordedRun]) -> str:
    """Return the run that contains a path, and the rest of the path; the path if no run does."""
    absolute = Path(os.path.abspath(path))
    for folder in (absolute, *absolute.parents):
        run = folders.get(str(folder))
        if run is not None:
            return run.name if folder == absolute else f"{run.name}, {absolute.relative_to(folder)}"
    return path


def list_data_uses(runs: Sequence[RecordedRun]) -> list[DataUse]:
    """Return the datasets and map ops of runs, the most used first."""
    runs_by_data: dict[tuple[str, str, str], list[str]] = {}
    for run in runs:
        runs_by_data.setdefault((name_data(run), run.data, join_ops(run)), []).append(run.name)
    uses = [
        DataUse(name, fingerprint, ops, tuple(names))
        for (name, fingerprint, ops), names in runs_by_data.items()
    ]
    return sorted(uses, key=lambda use: -len(use.runs))


def join_ops(run: RecordedRun) -> str:
    """Return the names of the map ops of a run's training split, in their order."""
    return ", ".join(
        str(value)
        for key, value in run.keys.items()
        if key.startswith("dataset.train.ops") and key.endswith(".name")
    )


def name_data(run: RecordedRun) -> str:
    """Return the dataset of a run, with the name of its folder or file."""
    name = str(run.keys.get("dataset.name", "?"))
    root = run.keys.get("dataset.root") or run.keys.get("dataset.path")
    return f"{name} of {Path(str(root)).name}" if root else name


MAX_COLUMNS = 40
MIN_FIGURES = 8
"""Columns that are left for figures if there are many keys."""
MAX_AXES = 9
MAX_CHOICES = 12
"""An axis has at most this many choices."""
COSTS = ("step_ms", "train_s", "steps", "parameters")
"""Figures of time and size, which have the last columns."""
DIGITS = 6
"""Significant digits of a number on the page."""
DRAWN_RUNS = 6
"""Number of runs whose curves are drawn when the page is opened."""
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


def write_page(runs: Sequence[RecordedRun], path: Path, folder: Path, metric: str | None) -> None:
    """Write the page of the runs in `folder`, which are ranked by `metric`.

    Raises RunError if the file can't be written.
    """
    importance: Sequence[KeyImportance] | str = "no run has a metric"
    if metric is not None:
        importance = compute_importances(runs, list_differing_keys(runs), metric)
    title = f"{len(runs)} run{'s' if len(runs) > 1 else ''} in {folder}"
    states = Counter(run.status for run in runs)
    summary = ", ".join(f"{count} {state}" for state, count in states.items())
    num_unranked = sum(metric not in run.figures for run in runs)
    if num_unranked < len(runs):
        summary += f"; ranked by {metric}"
        summary += f", which {num_unranked} don't have" if num_unranked else ""
    text = render_page(
        Page("runs", title, summary),
        "runs.html",
        content=make_page_data(runs, metric),
        importance=importance,
        uses=list_data_uses(runs),
        links=list_links(runs),
        shared={key: _shorten(value) for key, value in find_common_keys(runs).items()},
    )
    with convert_write_errors(path):
        write_whole(path, text)


def make_page_data(runs: Sequence[RecordedRun], metric: str | None) -> dict[str, Any]:
    """Return the input of the page's script as a tree for JSON; non-finite numbers are null.

    The metric has the first column, then come the keys that differ, then all other figures.
    """
    keys = list_differing_keys(runs)[: MAX_COLUMNS - MIN_FIGURES]
    figures = _choose_figures(runs, metric)[: MAX_COLUMNS - len(keys)]
    num_first = 1 if metric is not None else 0
    columns = [*figures[:num_first], *keys, *figures[num_first:]]
    axes = [key for key in keys if _has_readable_axis(runs, key)][: MAX_AXES - 1]
    drawable = [n for n, run in enumerate(runs) if metric in run.figures and run.curves]
    larger_is_better = metric is not None and is_larger_better(metric)
    ranked = sorted(drawable, key=lambda n: runs[n].figures[str(metric)], reverse=larger_is_better)
    eval_curve = f"eval {metric}"
    has_eval_curve = any(
        eval_curve in run.curves and len(run.curves[eval_curve].steps) > 1 for run in runs
    )
    return {
        "columns": columns,
        "runs": [_make_row(run, figures[:num_first], keys, figures[num_first:]) for run in runs],
        "log": [
            *(f for f in figures if _is_logarithmic([run.figures.get(f) for run in runs], 100)),
            *(key for key in keys if _is_logarithmic([run.keys.get(key) for run in runs], 10)),
        ],
        "axes": [*axes, metric] if metric is not None else axes,
        "sort": metric or "run",
        "down": larger_is_better,
        "curve": eval_curve if has_eval_curve else "loss",
        "picked": ranked[:DRAWN_RUNS],
    }


def _choose_figures(runs: Sequence[RecordedRun], metric: str | None) -> list[str]:
    """Return the figures to show: the metric, then those that differ, `COSTS` last."""
    names = dict.fromkeys(name for run in runs for name in run.figures)
    first = [metric] if metric is not None else []
    candidates = [name for name in names if name not in (*first, "count")]
    values = {name: {run.figures.get(name) for run in runs} - {None} for name in candidates}
    differing = [name for name in candidates if len(values[name]) > 1]
    return [*first, *sorted(differing, key=lambda name: name in COSTS)]


def _has_readable_axis(runs: Sequence[RecordedRun], key: str) -> bool:
    """Return whether a key varies, and its values are numbers or few choices."""
    values = [run.keys[key] for run in runs if run.keys.get(key) is not None]
    are_numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    num_choices = len({str(value) for value in values})
    return num_choices > 1 and (are_numbers or num_choices <= MAX_CHOICES)


def _is_logarithmic(values: Sequence[Any], span: float) -> bool:
    """Return whether values are numbers above 0, of which the largest is `span` times the least."""
    present = [value for value in values if value is not None]
    if not present or any(isinstance(v, bool) or not isinstance(v, int | float) for v in present):
        return False
    return min(present) > 0 and max(present) >= span * min(present)


def _make_row(
    run: RecordedRun, first: Sequence[str], keys: Sequence[str], figures: Sequence[str]
) -> dict[str, Any]:
    return {
        "name": run.name,
        "status": run.status,
        "problem": run.problem,
        "estimate": run.estimate,
        "values": [
            *(_shorten(run.figures.get(name)) for name in first),
            *(_shorten(run.keys.get(key)) for key in keys),
            *(_shorten(run.figures.get(name)) for name in figures),
        ],
        "curves": {
            name: [list(curve.steps), [_shorten(value) for value in curve.values]]
            for name, curve in run.curves.items()
        },
    }


def _shorten(value: Any) -> Any:
    """Return a value for JSON: a rounded float or null, an integer below 2^53, or short text."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value if value is None or abs(value) < 2**53 else str(value)
    return shorten(str(value), 120)


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
