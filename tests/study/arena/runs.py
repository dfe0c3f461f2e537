"""Made-up runs of an arena."""

from __future__ import annotations

from collections.abc import Sequence

from pipeline.study.arena.contest import SHIPPED
from pipeline.study.arena.contest_runs import ArenaRun, Entry, Heat


def make_run(values: Sequence[float | None], step_ms: float | None = 2.0) -> ArenaRun:
    """Return a run whose evaluations are ten steps apart; it has diverged if the last is None."""
    steps = tuple(10 * (number + 1) for number in range(len(values)))
    return ArenaRun(steps, tuple(values), step_ms, not values or values[-1] is None)


def make_entry(value: str, finals: Sequence[Sequence[float | None]]) -> Entry:
    """Return a value with two trials, the first of them chosen, and runs with seeds 1, 2, ..."""
    trials = ({"train.optimizer.lr": 0.1}, {"train.optimizer.lr": 0.01})
    runs = (make_run([0.5]), make_run([0.4]))
    return Entry(
        value, trials, runs, 0, {seed: make_run(run) for seed, run in enumerate(finals, start=1)}
    )


def make_failed_entry(value: str) -> Entry:
    """Return a value that diverges in both trials."""
    trials = ({"train.optimizer.lr": 0.1}, {"train.optimizer.lr": 0.01})
    return Entry(value, trials, (make_run([None]), make_run([])), None, {})


def make_heat(*entries: Entry, metric: str = "accuracy") -> Heat:
    return Heat(SHIPPED[0], metric, entries)
