"""`python -m pipeline runs [FOLDER]`: all runs below a folder, as a table or as one HTML page."""

from __future__ import annotations

import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import DataError, UsageError, printable, shorten
from pipeline.core.files.error_text import explain_unknown_name
from pipeline.core.files.strict_json import format_json
from pipeline.study.runs.page import write_page
from pipeline.study.runs.ranking import is_larger_better, main_metric
from pipeline.study.runs.recorded_run import MINOR, RecordedRun, list_differing_keys, read_runs
from pipeline.study.runs.ties import print_ties

PAGE = "runs.html"
MAX_KEYS = 4
MAX_ROWS = 50
"""The table has at most this many columns of keys, and rows, without --all."""
WATCH_S = 2.0
"""Seconds between two tables of --watch."""


def main(
    folder: Path,
    metric: str | None = None,
    *,
    html: bool = False,
    out: Path | None = None,
    as_json: bool = False,
    shows_all: bool = False,
    watches: bool = False,
) -> int:
    """Print the runs, or write their page; the exit status is 0.

    Raises UsageError for `out` without `html`, and for `html`, `as_json` or `out` with `watches`.
    Raises DataError if the folder can't be read or has no run, or if no run has `metric`.
    """
    if watches:
        if html or as_json or out is not None:
            raise UsageError(["--watch"], "prints a table, without --html, --json and --out")
        with suppress(KeyboardInterrupt):
            while True:
                Console().clear()
                main(folder, metric, shows_all=shows_all)
                time.sleep(WATCH_S)
        return 0
    if out is not None and not html:
        raise UsageError([f"--out {out}"], "needs --html, which writes the page")
    runs = read_runs(folder, curves=html)
    ranked_by = _choose_metric(metric, runs)
    if html:
        page = out or folder / PAGE
        write_page(runs, page, folder, ranked_by)
        text = f"{len(runs)} runs: {printable(str(page))}"
        print(format_json({"page": str(page)}) if as_json else text)
    elif as_json:
        for run in runs:
            print(format_json(_to_dict(run)))
    else:
        _print_table(_rank_runs(runs, ranked_by), ranked_by, shows_all=shows_all)
        if ranked_by is not None:
            varied = [key for key in list_differing_keys(runs) if not key.startswith(MINOR)]
            rated_settings = []
            for run in runs:
                # A run that was stopped has trained for fewer steps.
                if run.status == "done" and ranked_by in run.figures:
                    settings = {key: run.keys.get(key) for key in varied}
                    rated_settings.append((settings, run.figures[ranked_by]))
            print_ties(rated_settings, ranked_by)
    return 0


def _choose_metric(name: str | None, runs: Sequence[RecordedRun]) -> str | None:
    """Return `name`, or by default the main metric of the runs; None if they have no metric.

    Raises DataError if no run has the metric `name`.
    """
    names = dict.fromkeys(figure for run in runs for figure in run.figures)
    if name is not None and name not in names:
        raise DataError(
            f"--metric {name}: {explain_unknown_name('figure of these runs', name, names)}"
        )
    return name or main_metric([run.figures for run in runs])


def _to_dict(run: RecordedRun) -> dict[str, Any]:
    return {
        "run": run.name,
        "status": run.status,
        "begun": run.begun,
        "figures": dict(run.figures),
        "keys": dict(run.keys),
        "data": run.data,
        "code": list(run.commits),
        "problem": run.problem,
        "live": None if run.live is None else asdict(run.live),
    }


def _rank_runs(runs: Sequence[RecordedRun], metric: str | None) -> list[RecordedRun]:
    """Return the runs, the best first. Runs without the metric are last, in their order."""
    if metric is None:
        return list(runs)
    ranked = [run for run in runs if metric in run.figures]
    ranked.sort(key=lambda run: run.figures[metric], reverse=is_larger_better(metric))
    return ranked + [run for run in runs if metric not in run.figures]


def _print_table(runs: Sequence[RecordedRun], metric: str | None, *, shows_all: bool) -> None:
    keys = list_differing_keys(runs)
    shown_keys = keys if shows_all else keys[:MAX_KEYS]
    # The metric may be one of the two times.
    names = dict.fromkeys((metric or "step_ms", "step_ms", "train_s"))
    figures = [name for name in names if any(name in run.figures for run in runs)]
    rows = runs if shows_all else runs[:MAX_ROWS]
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("run", overflow="fold", min_width=20)
    for head in ("status", *figures, *shown_keys):
        table.add_column(printable(head.replace("_", " ").replace(".", " ")))
    for run in rows:
        values = [run.figures.get(name) for name in figures]
        values += [run.keys.get(key) for key in shown_keys]
        cells = [run.name, run.status, *map(_format_cell, values)]
        table.add_row(*map(printable, cells))
    # Otherwise rich reads text in brackets as markup.
    console = Console(markup=False)
    console.print(table)
    unranked = [run for run in runs if metric not in run.figures]
    if metric is not None and unranked:
        console.print(f"ranked by {metric}, which {len(unranked)} of {len(runs)} runs don't have")
    for run in runs:
        if run.live is not None:
            console.print(printable(f"{run.name}: {run.live}"))
        if run.problem:
            console.print(printable(f"{run.name}: {run.problem}"))
    hidden = []
    if len(rows) < len(runs):
        hidden.append(f"{len(runs) - len(rows)} more runs")
    if len(shown_keys) < len(keys):
        hidden.append(f"{len(keys) - len(shown_keys)} more keys differ")
    if hidden:
        console.print(f"{' and '.join(hidden)}: --all, or --html for a page")


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return shorten(" ".join(str(value).split()), 40)
