"""Logs of an arena in AlgoPerf's format, and AlgoPerf's score of such logs.

The logs are those that the benchmark's reference code writes and its scoring code reads:
`SUBMISSION/STUDY/WORKLOAD_jax/trial_1/eval_measurements.csv`. A value of the arena's key is a
submission, a fresh seed is a study, and each study has one trial, as in the ruleset of self-tuning.
The scores are Dahl et al. 2023, "Benchmarking Neural Network Training Algorithms": the time of a
submission on a workload is the median over studies, infinite if it is above four times the fastest;
the score is the integral of the performance profile (Dolan and More 2002) over ratios from 1 to 4,
at 100 points by the trapezoid rule, divided by 3.
"""

from __future__ import annotations

import csv
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from statistics import median

import numpy as np

from pipeline.core.errors import DataError
from pipeline.core.files.atomic_write import convert_write_errors, write_whole
from pipeline.core.files.bounded_read import read_text
from pipeline.study.arena.contest_runs import ArenaRun, Heat

LOGS = "algoperf"
"""Folder of the logs."""
MEASUREMENTS = "eval_measurements.csv"
MAX_BYTES = 64 << 20
FRAMEWORK = "jax"
TIME = "score"
"""Column of the time that is scored: `accumulated_submission_time` of the evaluation."""
STEP = "global_step"
LARGEST_RATIO = 4.0
"""A submission that takes this many times as long as the fastest doesn't count as reaching it."""
POINTS = 100
"""Ratios at which the profile is integrated."""


@dataclass(frozen=True)
class Goal:
    """The target of a workload: a validation metric that is at least, or at most, `value`."""

    metric: str
    value: float
    is_larger: bool


def write_logs(folder: Path, heats: Iterable[Heat], names: Mapping[str, str]) -> None:
    """Write the logs of all final runs below `folder`; `names` are the folders of values.

    Logs of an earlier call with more seeds are removed. Times are steps times the run's measured
    time of a step. Evaluations aren't timed apart, so their column is empty. Raises RunError if a
    file can't be written.
    """
    current_logs = set()
    for heat in heats:
        for entry in heat.entries:
            for number, run in enumerate(entry.finals.values(), start=1):
                workload = f"{heat.workload.name}_{FRAMEWORK}"
                place = folder / names[entry.value] / f"study_{number}" / workload / "trial_1"
                with convert_write_errors(place):
                    place.mkdir(parents=True, exist_ok=True)
                    write_whole(place / MEASUREMENTS, format_measurements(run, heat.metric))
                current_logs.add(place / MEASUREMENTS)
    for log in folder.glob(f"*/study_*/*_{FRAMEWORK}/trial_1/{MEASUREMENTS}"):
        if log not in current_logs:
            with convert_write_errors(log):
                log.unlink()


def format_measurements(run: ArenaRun, metric: str) -> str:
    """Return a run's evaluations as AlgoPerf's `eval_measurements.csv`."""
    text = StringIO()
    columns = [
        "accumulated_eval_time",
        "accumulated_logging_time",
        "accumulated_submission_time",
        STEP,
        "preemption_count",
        TIME,
        "total_duration",
        f"validation/{metric}",
    ]
    rows = csv.writer(text, lineterminator="\n")
    rows.writerow(columns)
    for step, value in zip(run.steps, run.values, strict=True):
        seconds = "" if run.step_ms is None else repr(step * run.step_ms / 1000)
        number = "nan" if value is None else repr(value)
        rows.writerow(["", "", seconds, step, 0, seconds, seconds, number])
    return text.getvalue()


def read_times(
    folder: Path, submission: str, goals: Mapping[str, Goal], column: str
) -> dict[str, float]:
    """Return a submission's time on each workload: the median over studies of the fastest trial.

    `column` is `TIME` for seconds or `STEP` for steps. Raises DataError if a log can't be read.
    """
    times = {}
    for workload, goal in goals.items():
        studies = []
        for study in sorted((folder / submission).glob("study_*")):
            logs = sorted(study.glob(f"{workload}_{FRAMEWORK}/trial_*/{MEASUREMENTS}"))
            if logs:
                studies.append(min(_read_time(log, goal, column) for log in logs))
        times[workload] = median(studies) if studies else math.inf
    return times


def _read_time(log: Path, goal: Goal, column: str) -> float:
    """Return the time of the first evaluation that reaches the goal, infinite if none does."""
    try:
        for row in csv.DictReader(StringIO(read_text(log, MAX_BYTES))):
            value = float(row[f"validation/{goal.metric}"])
            if value >= goal.value if goal.is_larger else value <= goal.value:
                return float(row[column])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise DataError(f"{log}: isn't a log of evaluations: {error}") from error
    return math.inf


def compute_scores(times: Mapping[str, Mapping[str, float]]) -> dict[str, float]:
    """Return the score of each submission, from 0 to 1; `times` are by submission and workload."""
    workloads: Sequence[str] = list(next(iter(times.values()), {}))
    fastest = {name: min(by_workload[name] for by_workload in times.values()) for name in workloads}
    ratios = np.linspace(1.0, LARGEST_RATIO, POINTS)
    scores = {}
    for submission, by_workload in times.items():
        reached = np.array([_divide_times(by_workload[name], fastest[name]) for name in workloads])
        if not len(reached):
            scores[submission] = 0.0
            continue
        profile = (reached[None, :] <= ratios[:, None]).mean(axis=1)
        area = float(((profile[1:] + profile[:-1]) / 2 * np.diff(ratios)).sum())
        scores[submission] = area / (LARGEST_RATIO - 1)
    return scores


def _divide_times(time: float, fastest: float) -> float:
    """Return the ratio of a time to the fastest one, which may be 0; infinite for no time."""
    if not math.isfinite(time):
        return math.inf
    if time == fastest:
        return 1.0
    return time / fastest if fastest else math.inf
