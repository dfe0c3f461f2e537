"""Standings of an arena: who is better than the baseline, and in how many steps.

On each workload the *target* is the metric that more than half of the baseline's runs reach at
their end. The steps of a value are the median, over seeds, of the first evaluation that is at least
as good as the target; a run that never is counts as infinite. The interval of the median holds it
with at least 95 %, whatever the distribution: it is between two runs in order, by the binomial
distribution. Verdicts are about the last evaluation, by `pipeline.study.paired_test`.

All figures but times are functions of the runs' numbers, so they repeat bit for bit.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Any, Literal

import numpy as np

from pipeline.study.arena.contest_runs import ArenaRun, Entry, Heat
from pipeline.study.paired_test import (
    ERROR,
    MIN_PAIRS,
    compute_interval,
    count_pairs_to_decide,
)
from pipeline.study.runs.ranking import is_larger_better

CONFIDENCE = 0.95
Verdict = Literal["baseline", "better", "worse", "tied", "identical", "diverged"]


@dataclass(frozen=True)
class MedianInterval:
    """A median over runs, and its interval; infinite for runs that never reach the target."""

    median: float
    low: float
    high: float


@dataclass(frozen=True)
class Standing:
    """A value on a workload."""

    value: str
    settings: Mapping[str, float] | None
    """The chosen numbers; None if all trials have diverged."""
    at_edge: tuple[str, ...]
    """Keys whose chosen number is the least or the greatest of the trials."""
    diverged_trials: int
    num_trials: int
    diverged_runs: int
    num_runs: int
    mean: float | None
    """Mean of the last evaluations of runs that haven't diverged."""
    verdict: Verdict
    difference: float | None
    """Mean of value - baseline over the pairs, a positive number if larger."""
    low: float | None
    high: float | None
    """Ends of the 95 % interval of the mean difference."""
    pairs: int
    steps: MedianInterval | None
    """Steps to the target; None without a target."""
    speedup: float | None
    """Steps of the baseline by those of the value; 0 if the value doesn't reach the target."""
    step_ms: float | None = field(default=None, metadata={"measured": True})
    """Median time of a step, measured."""
    seconds: MedianInterval | None = field(default=None, metadata={"measured": True})
    """Time of the steps to the target, measured."""

    def to_dict(self) -> dict[str, Any]:
        """Return what repeats bit for bit, for JSON."""
        facts = {name: value for name, value in vars(self).items() if name not in MEASURED}
        facts["steps"] = None if self.steps is None else vars(self.steps)
        return facts

    def to_times(self) -> dict[str, Any]:
        """Return the measured times, for JSON."""
        seconds = None if self.seconds is None else vars(self.seconds)
        return {"step_ms": self.step_ms, "seconds": seconds}


MEASURED = ("step_ms", "seconds")
"""Fields of a standing that are times."""


@dataclass(frozen=True)
class WorkloadStandings:
    """All values on a workload."""

    workload: str
    metric: str
    total_steps: int
    target: float | None
    """None if the baseline has diverged in half of its runs or more."""
    baseline: str
    standings: tuple[Standing, ...]
    best: str | None
    """The value with the best mean, in which diverged runs count as the worst run of all; None if
    all have diverged."""
    tied_with_best: tuple[str, ...]

    def to_dict(self) -> dict[str, Any]:
        """Return what repeats bit for bit, for JSON."""
        facts = {name: value for name, value in vars(self).items() if name != "standings"}
        return {**facts, "standings": [item.to_dict() for item in self.standings]}


def judge_heat(heat: Heat, baseline: str) -> WorkloadStandings:
    """Return the standings of a workload."""
    is_larger = is_larger_better(heat.metric)
    entries = {entry.value: entry for entry in heat.entries}
    target = find_target(list(entries[baseline].finals.values()), is_larger=is_larger)
    values = fill_diverged(entries, is_larger=is_larger)
    has_diverged = all(run.value is None for run in entries[baseline].finals.values())
    standings = [
        _judge_entry(entry, baseline, values, is_larger=is_larger, has_diverged=has_diverged)
        for entry in heat.entries
    ]
    standings = [
        _add_steps(item, entries, (baseline, target), is_larger=is_larger) for item in standings
    ]
    best, tied = find_best(values, standings, is_larger=is_larger)
    return WorkloadStandings(
        heat.workload.name,
        heat.metric,
        heat.workload.steps,
        target,
        baseline,
        tuple(standings),
        best,
        tied,
    )


def find_target(runs: Sequence[ArenaRun], *, is_larger: bool) -> float | None:
    """Return the metric that more than half of the runs reach at their end; None if too few have
    one."""
    finite = sorted((run.value for run in runs if run.value is not None), reverse=is_larger)
    position = len(runs) // 2
    return finite[position] if position < len(finite) else None


def fill_diverged(entries: Mapping[str, Entry], *, is_larger: bool) -> dict[str, dict[int, float]]:
    """Return the last evaluation by value and seed; a run that has diverged gets the worst of all.

    So pairs of equal values still have differences that are symmetric around 0.
    """
    runs = [run.value for entry in entries.values() for run in entry.finals.values()]
    finite = [value for value in runs if value is not None]
    worst = (min if is_larger else max)(finite, default=0.0)
    return {
        name: {
            seed: worst if run.value is None else run.value for seed, run in entry.finals.items()
        }
        for name, entry in entries.items()
    }


def _judge_entry(
    entry: Entry,
    baseline: str,
    values: Mapping[str, Mapping[int, float]],
    *,
    is_larger: bool,
    has_diverged: bool,
) -> Standing:
    """Return the standing of a value; `has_diverged` is whether all runs of the baseline have."""
    finals = list(entry.finals.values())
    finite = [run.value for run in finals if run.value is not None]
    figures, reference = values[entry.value], values[baseline]
    if has_diverged:
        # A finite run is better than one that has diverged, the worst finite run too.
        margin = (max(figures.values(), default=0.0) - min(figures.values(), default=0.0)) or 1.0
        margin = margin if is_larger else -margin
        is_finite = {seed: run.value is not None for seed, run in entry.finals.items()}
        reference = {seed: v - margin * is_finite.get(seed, 0) for seed, v in reference.items()}
    differences = np.array(
        [figures[seed] - reference[seed] for seed in figures if seed in reference]
    )
    pairs = len(differences)
    low = high = difference = None
    verdict: Verdict = "baseline" if entry.value == baseline else "tied"
    if not finite:
        verdict = "diverged"
    elif verdict == "tied" and pairs:
        verdict, pairs = judge_differences(differences, is_larger=is_larger)
        difference = float(differences[:pairs].mean())
        low, high = compute_interval(differences[:pairs])
    elif verdict == "tied":
        # The baseline has diverged in every trial.
        verdict = "better"
    step_ms = [run.step_ms for run in finals if run.step_ms is not None]
    return Standing(
        value=entry.value,
        settings=entry.settings,
        at_edge=_find_edges(entry),
        diverged_trials=sum(run.has_diverged for run in entry.trial_runs),
        num_trials=len(entry.trial_runs),
        diverged_runs=sum(run.value is None for run in finals),
        num_runs=len(finals),
        mean=float(np.mean(finite)) if finite else None,
        verdict=verdict,
        difference=difference,
        low=low,
        high=high,
        pairs=pairs,
        steps=None,
        speedup=None,
        step_ms=median(step_ms) if step_ms else None,
    )


def judge_differences(differences: np.ndarray, *, is_larger: bool) -> tuple[Verdict, int]:
    """Return the verdict on differences value - baseline, float64 (pairs,), and the pairs that
    decide it."""
    if not differences.any():
        return "identical", len(differences)
    deciding = count_pairs_to_decide(differences)
    if deciding is None:
        return "tied", len(differences)
    low, _ = compute_interval(differences[:deciding])
    return ("better" if (low > 0) == is_larger else "worse"), deciding


def _find_edges(entry: Entry) -> tuple[str, ...]:
    """Return the keys whose chosen number is at an end of the trials that haven't diverged."""
    settings = entry.settings or {}
    edges = []
    for key, number in settings.items():
        numbers = [trial[key] for trial in entry.trials]
        if len(numbers) > 1 and number in (min(numbers), max(numbers)):
            edges.append(key)
    return tuple(edges)


def _add_steps(
    standing: Standing,
    entries: Mapping[str, Entry],
    goal: tuple[str, float | None],
    *,
    is_larger: bool,
) -> Standing:
    """Return a standing with its steps and seconds to the target, and the speedup."""
    baseline, target = goal
    if target is None or not entries[standing.value].finals:
        return standing
    counts = _list_steps(entries[standing.value], target, is_larger=is_larger)
    steps = compute_median_interval(counts)
    reference = compute_median_interval(
        _list_steps(entries[baseline], target, is_larger=is_larger)
    ).median
    finals = entries[standing.value].finals.values()
    seconds = [
        count * (run.step_ms or math.nan) / 1000 for count, run in zip(counts, finals, strict=True)
    ]
    facts = {
        **vars(standing),
        "steps": steps,
        "speedup": reference / steps.median,
        "seconds": None if np.isnan(seconds).any() else compute_median_interval(seconds),
    }
    return Standing(**facts)


def _list_steps(entry: Entry, target: float, *, is_larger: bool) -> list[float]:
    """Return the steps to the target of each run, infinite if it is never reached."""
    steps = [run.find_step(target, is_larger=is_larger) for run in entry.finals.values()]
    return [math.inf if step is None else float(step) for step in steps]


def compute_median_interval(numbers: Sequence[float]) -> MedianInterval:
    """Return the median, the greater of two middle ones, and the narrowest interval between two
    numbers in order that holds the distribution's median with at least 95 %.

    With fewer than `MIN_PAIRS` numbers its ends are 0 and infinity.
    """
    ordered = sorted(numbers)
    count = len(ordered)
    middle = ordered[count // 2]
    if count < MIN_PAIRS:
        return MedianInterval(middle, 0.0, math.inf)
    cut = 0
    # The median is below the number at `cut` if at most `cut` numbers are below the median.
    while _share_below(cut + 1, count) <= (1 - CONFIDENCE) / 2:
        cut += 1
    return MedianInterval(middle, ordered[cut], ordered[-1 - cut])


def _share_below(cut: int, count: int) -> float:
    """Return the probability of at most `cut` heads among `count` fair coins."""
    return sum(math.comb(count, heads) for heads in range(cut + 1)) / 2**count


def find_best(
    values: Mapping[str, Mapping[int, float]], standings: Sequence[Standing], *, is_larger: bool
) -> tuple[str | None, tuple[str, ...]]:
    """Return the value with the best mean, and those that the test can't distinguish from it.

    The best is the greatest of several, so `ERROR` is divided by the number of pairs of values: if
    all are equal, one or more are called worse than the best in at most 5 % of workloads.
    """
    error = ERROR / max(1, math.comb(len(standings), 2))
    means = {
        item.value: float(np.mean(list(values[item.value].values())))
        for item in standings
        if item.mean is not None
    }
    if not means:
        return None, ()
    best = (max if is_larger else min)(means, key=lambda name: means[name])
    tied = []
    for name in means:
        differences = [values[name][seed] - values[best][seed] for seed in values[best]]
        if name != best and count_pairs_to_decide(np.array(differences), error) is None:
            tied.append(name)
    return best, tuple(tied)
