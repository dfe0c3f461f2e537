"""The page of all runs: one HTML file with its data, style and script, without server or net."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.pages.page import Page, render_page
from pipeline.study.runs.importance import KeyImportance
from pipeline.study.runs.lineage import links_of, uses_of_data
from pipeline.study.runs.recorded_run import RecordedRun, common_keys, differing_keys

MOST_COLUMNS = 40
MOST_AXES = 9
MOST_CHOICES = 12
"""Choices of an axis at most."""
SPEEDS = ("step_ms", "train_s", "steps", "parameters")
DIGITS = 6
"""Significant digits of a number on the page."""
PICKED = 6
"""Runs whose curves are drawn when the page is opened."""


def write_page(
    runs: Sequence[RecordedRun],
    path: Path,
    *,
    folder: Path,
    metric: str | None,
    larger_is_better: bool,
    importance: Sequence[KeyImportance] | str,
) -> None:
    """Write the page of runs; `metric` is the one that they are ranked by.

    Raises RunError if the disk refuses.
    """
    content = page_data(runs, metric, larger_is_better)
    title = f"{len(runs)} run{'s' if len(runs) > 1 else ''} in {folder}"
    states = Counter(run.status for run in runs)
    summary = ", ".join(f"{count} {state}" for state, count in states.items())
    lacking = sum(metric not in run.figures for run in runs)
    if lacking < len(runs):
        summary += f"; ranked by {metric}"
        summary += f", which {lacking} don't have" if lacking else ""
    text = render_page(
        Page("runs", title, summary),
        "runs.html",
        content=content,
        importance=importance,
        uses=uses_of_data(runs),
        links=links_of(runs),
        shared={key: _short(value) for key, value in common_keys(runs).items()},
    )
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from error


def page_data(
    runs: Sequence[RecordedRun], metric: str | None, larger_is_better: bool
) -> dict[str, Any]:
    """Return what the page's script draws, as JSON; a number that is not finite is null."""
    keys = differing_keys(runs)[: MOST_COLUMNS - 8]
    figures = _figures(runs, metric)[: MOST_COLUMNS - len(keys)]
    axes = [key for key in keys if _spreads(runs, key)][: MOST_AXES - 1]
    rated = [n for n, run in enumerate(runs) if metric in run.figures and run.curves]
    sign = -1 if larger_is_better else 1
    ranked = sorted(rated, key=lambda n: sign * runs[n].figures[str(metric)])
    evaluated = f"eval {metric}"
    is_evaluated = any(
        evaluated in run.curves and len(run.curves[evaluated].steps) > 1 for run in runs
    )
    return {
        "columns": [*figures, *keys],
        "runs": [_run(run, figures, keys) for run in runs],
        "log": [
            *(f for f in figures if _is_logarithmic([run.figures.get(f) for run in runs], 100)),
            *(key for key in keys if _is_logarithmic([run.keys.get(key) for run in runs], 10)),
        ],
        "axes": [*axes, metric] if metric is not None else axes,
        "sort": metric or "run",
        "down": larger_is_better,
        "curve": evaluated if is_evaluated else "loss",
        "picked": ranked[:PICKED],
    }


def _figures(runs: Sequence[RecordedRun], metric: str | None) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.figures)
    first = [metric] if metric is not None else []
    candidates = [name for name in names if name not in (*first, "count")]
    values = {name: {run.figures.get(name) for run in runs} - {None} for name in candidates}
    differing = [name for name in candidates if len(values[name]) > 1]
    return [*first, *sorted(differing, key=lambda name: name in SPEEDS)]


def _spreads(runs: Sequence[RecordedRun], key: str) -> bool:
    """Whether an axis of the key can be read: numbers, or few choices."""
    values = [run.keys[key] for run in runs if run.keys.get(key) is not None]
    numbers = all(isinstance(v, int | float) and not isinstance(v, bool) for v in values)
    choices = len({str(value) for value in values})
    return choices > 1 and (numbers or choices <= MOST_CHOICES)


def _is_logarithmic(values: Sequence[Any], span: float) -> bool:
    """Return whether all values are above 0, and the largest is `span` times the smallest."""
    there = [value for value in values if value is not None]
    if not there or any(isinstance(v, bool) or not isinstance(v, int | float) for v in there):
        return False
    return min(there) > 0 and max(there) >= span * min(there)


def _run(run: RecordedRun, figures: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
    return {
        "name": run.name,
        "status": run.status,
        "problem": run.problem,
        "values": [
            *(_short(run.figures.get(name)) for name in figures),
            *(_short(run.keys.get(key)) for key in keys),
        ],
        "curves": {
            name: [list(curve.steps), [_short(value) for value in curve.values]]
            for name, curve in run.curves.items()
        },
    }


def _short(value: Any) -> Any:
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, float):
        return float(f"{value:.{DIGITS}g}") if math.isfinite(value) else None
    if value is None or isinstance(value, int):
        return value if value is None or abs(value) < 2**53 else str(value)
    text = str(value)
    return text if len(text) <= 120 else f"{text[:117]}..."
