"""The page of all runs: one HTML file with its data, style and script, without server or net."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from html import escape
from importlib.resources import files
from pathlib import Path
from typing import Any

from pipeline.core.errors import RunError
from pipeline.core.files.atomic_write import write_whole
from pipeline.study.runs.differing_keys import common_keys, differing_keys
from pipeline.study.runs.importance import KeyImportance
from pipeline.study.runs.kept_run import KeptRun
from pipeline.study.runs.lineage import links_of, uses_of_data

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
    runs: Sequence[KeptRun],
    path: Path,
    *,
    folder: Path,
    metric: str | None,
    larger_is_better: bool,
    importance: Sequence[KeyImportance] | str,
) -> None:
    """Write the page of runs; `metric` is the one that they are ranked by.

    Raises RunError where the disk refuses.
    """
    content = page_data(runs, metric, larger_is_better, importance)
    # Half a character of a stranger's file has no bytes.
    text = _page(content, runs, folder).encode("utf-8", "replace").decode()
    try:
        write_whole(path, text)
    except OSError as error:
        raise RunError(f"{path}: can't be written: {error.strerror}") from error


def page_data(
    runs: Sequence[KeptRun],
    metric: str | None,
    larger_is_better: bool,
    importance: Sequence[KeyImportance] | str,
) -> dict[str, Any]:
    """Return what the page's script draws, as JSON; a number that is not finite is null."""
    keys = differing_keys(runs)[: MOST_COLUMNS - 8]
    figures = _figures(runs, metric)[: MOST_COLUMNS - len(keys)]
    axes = [key for key in keys if _spreads(runs, key)][: MOST_AXES - 1]
    ranked = _ranked(runs, metric, larger_is_better)
    evaluated = f"eval {metric}"
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
        "curve": evaluated if any(_is_curve(run, evaluated) for run in runs) else "loss",
        "picked": ranked[:PICKED],
        "importance": importance
        if isinstance(importance, str)
        else [[i.key, *(round(v, 4) for v in (i.median, i.low, i.high))] for i in importance],
        "links": [[link.source, link.relation, link.target] for link in links_of(runs)],
        "data": [vars(use) for use in uses_of_data(runs)],
    }


def _is_curve(run: KeptRun, name: str) -> bool:
    return name in run.curves and len(run.curves[name].steps) > 1


def _figures(runs: Sequence[KeptRun], metric: str | None) -> list[str]:
    names = dict.fromkeys(name for run in runs for name in run.figures)
    first = [metric] if metric is not None else []
    known = [name for name in names if name not in (*first, "count")]
    values = {name: {run.figures.get(name) for run in runs} - {None} for name in known}
    differing = [name for name in known if len(values[name]) > 1]
    return [*first, *sorted(differing, key=lambda name: name in SPEEDS)]


def _spreads(runs: Sequence[KeptRun], key: str) -> bool:
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


def _ranked(runs: Sequence[KeptRun], metric: str | None, larger_is_better: bool) -> list[int]:
    rated = [n for n, run in enumerate(runs) if metric in run.figures and run.curves]
    sign = -1 if larger_is_better else 1
    return sorted(rated, key=lambda n: sign * runs[n].figures[str(metric)])


def _run(run: KeptRun, figures: Sequence[str], keys: Sequence[str]) -> dict[str, Any]:
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


def _page(content: Mapping[str, Any], runs: Sequence[KeptRun], folder: Path) -> str:
    # `<` could end the element that holds the data.
    data = json.dumps(content, separators=(",", ":"), allow_nan=False).replace("<", "\\u003c")
    style = files("pipeline.study.runs").joinpath("page.css").read_text("utf-8")
    script = files("pipeline.core.pages").joinpath("templates", "runs.js").read_text("utf-8")
    return "\n".join(
        (
            "<!doctype html>",
            '<html lang="en"><head><meta charset="utf-8">',
            '<meta name="viewport" content="width=device-width, initial-scale=1">',
            f"<title>{escape(_title(runs, folder))}</title>",
            f"<style>{style}</style></head><body><main>",
            f"<h1>{escape(_title(runs, folder))}</h1>",
            f"<p>{escape(_states(runs))}{escape(_ranking(runs, content['sort']))}</p>",
            BODY,
            _common(runs),
            f'<script type="application/json" id="runs">{data}</script>',
            f"<script>{script}</script>",
            "</main></body></html>",
            "",
        )
    )


def _title(runs: Sequence[KeptRun], folder: Path) -> str:
    return f"{len(runs)} run{'s' if len(runs) > 1 else ''} in {folder}"


def _states(runs: Sequence[KeptRun]) -> str:
    states = [run.status for run in runs]
    return ", ".join(f"{states.count(state)} {state}" for state in dict.fromkeys(states))


def _ranking(runs: Sequence[KeptRun], metric: str) -> str:
    """Return by what the runs are ranked, and how many lack it; nothing without a metric."""
    lacking = sum(metric not in run.figures for run in runs)
    if lacking == len(runs):
        return ""
    return f"; ranked by {metric}" + (f", which {lacking} don't have" if lacking else "")


def _common(runs: Sequence[KeptRun]) -> str:
    shared = common_keys(runs)
    lines = "".join(
        f"<li>{escape(key)}: {escape(str(_short(v)))}</li>" for key, v in shared.items()
    )
    return (
        f"<details><summary>{len(shared)} keys that all runs share</summary>"
        f'<ul class="lineage">{lines}</ul></details>'
    )


BODY = """
<div class="controls">
<input type="search" id="filter" aria-label="filter of runs"
 placeholder="filter: words, or conditions such as lr&gt;0.01 status=done">
<span id="count"></span><button id="clear">clear</button>
<span id="unknown" role="status"></span></div>
<div class="scroll" tabindex="0"><table id="table"></table></div>
<h2>Curves of picked runs</h2>
<div class="controls"><label>of <select id="curve"></select></label>
<label><input type="checkbox" id="log"> logarithm</label></div>
<div class="drawing" id="curves"></div><ul class="legend" id="legend"></ul>
<h2>Keys and results, one line a run</h2>
<p>Drag along an axis to keep a range; click it to clear.</p>
<div class="drawing" id="axes"></div>
<h2>What matters: importance of keys</h2>
<p>Share of what the best runs have in common (PED-ANOVA); the thin bar is the range of 80 % of
bootstrap samples.</p>
<div class="bars" id="importance"></div>
<h2>Scatter</h2>
<div class="controls"><label>across <select id="across"></select></label>
<label>up <select id="up"></select></label></div>
<div class="drawing" id="scatter"></div>
<h2>Lineage</h2>
<p>Data with its map ops, and what a run began with.</p>
<div id="lineage"></div>
""".strip()
