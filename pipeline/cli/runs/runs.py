"""`python -m pipeline runs [FOLDER]`: all runs below a folder, as a table or as one HTML page."""

from __future__ import annotations

import shutil
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.cells import cell_len
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import DataError, UsageError, printable
from pipeline.core.files.atomic_write import format_json
from pipeline.core.files.name_text import explain_unknown_name
from pipeline.core.files.value_text import count_noun
from pipeline.study.runs.page import write_page
from pipeline.study.runs.ranking import is_larger_better, main_metric, print_ties
from pipeline.study.runs.recorded_run import MINOR, RecordedRun, list_differing_keys, read_runs

PAGE = "runs.html"
MAX_KEYS = 4
MAX_ROWS = 50
"""The table has at most this many columns of keys, and rows, without --all."""
UNLIMITED = 10_000
"""Width of the table if nothing limits it, in characters."""
MIN_NAME = 20
"""Names of runs are cut to no fewer letters than this."""
MAX_CELL = 40
"""Most letters of a value."""
EDGES = 3
"""Characters at both edges of the table and after the name."""
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
        text = f"{count_noun(len(runs), 'run')}: {printable(str(page))}"
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
        "interruption": run.interruption,
        "estimate": run.estimate,
    }


def _rank_runs(runs: Sequence[RecordedRun], metric: str | None) -> list[RecordedRun]:
    """Return the runs, the best first. Runs without the metric are last, in their order."""
    if metric is None:
        return list(runs)
    ranked = [run for run in runs if metric in run.figures]
    ranked.sort(key=lambda run: run.figures[metric], reverse=is_larger_better(metric))
    return ranked + [run for run in runs if metric not in run.figures]


def _print_table(runs: Sequence[RecordedRun], metric: str | None, *, shows_all: bool) -> None:
    """Print a line for each run, as wide as the terminal, or as it needs to be without one.

    Names lose their beginning, but still differ, and keys that don't fit are left out.
    """
    keys = list_differing_keys(runs)
    # The metric may be one of the two times.
    names = dict.fromkeys((metric or "step_ms", "step_ms", "train_s"))
    figures = [name for name in names if any(name in run.figures for run in runs)]
    rows = runs if shows_all else runs[:MAX_ROWS]
    width = UNLIMITED if shows_all else shutil.get_terminal_size((UNLIMITED, 0)).columns
    columns = [
        _TableColumn("status", [run.status for run in rows]),
        *(_TableColumn(name, [run.figures.get(name) for run in rows]) for name in figures),
    ]
    run_names = [printable(run.name) for run in rows]
    name_width = max(_count_distinct_letters(run_names), min(MIN_NAME, max(map(len, run_names))))
    room = width - EDGES - name_width - sum(column.width for column in columns)
    while room < 0 and len(columns) > 2:  # status and the metric stay
        room += columns.pop().width
    shown_keys = []
    for key in keys if shows_all else keys[:MAX_KEYS]:
        column = _TableColumn(key, [run.keys.get(key) for run in rows])
        if column.width > room:
            break
        room -= column.width
        shown_keys.append(key)
        columns.append(column)
    table = Table(box=SIMPLE_HEAD, padding=0)
    table.add_column("run", no_wrap=True)
    for column in columns:
        table.add_column(column.head, no_wrap=True)
    cut_names = [_cut_start(name, max(1, name_width + room)) for name in run_names]
    for cells in zip(cut_names, *(column.cells for column in columns), strict=True):
        table.add_row(*cells)
    # Otherwise rich reads text in brackets as markup.
    Console(markup=False, width=width).print(table)
    console = Console(markup=False)
    unranked = [run for run in runs if metric not in run.figures]
    if metric is not None and unranked:
        console.print(f"ranked by {metric}, which {len(unranked)} of {len(runs)} runs don't have")
    for run in runs:
        if run.live is not None:
            console.print(printable(f"{run.name}: {run.live}"))
        if run.estimate:
            console.print(printable(f"{run.name}: {run.estimate}"))
        if run.interruption:
            console.print(printable(f"{run.name}: {run.interruption}"))
        if run.problem:
            console.print(printable(f"{run.name}: {run.problem}"))
    hidden = []
    if len(rows) < len(runs):
        hidden.append(f"{len(runs) - len(rows)} more runs")
    if len(shown_keys) < len(keys):
        hidden.append(f"{len(keys) - len(shown_keys)} more keys differ")
    if hidden:
        console.print(f"{' and '.join(hidden)}: --all, or --html for a page")


class _TableColumn:
    """A column of the table: its head, a word a line, and a text for each run."""

    def __init__(self, name: str, values: Sequence[Any]) -> None:
        words = printable(name.replace("_", " ").replace(".", " ")).split()
        self.head = "\n".join(words)
        self.cells = [_format_cell(value) for value in values]
        self.width = 1 + max(map(cell_len, (*words, *self.cells)))
        """Width with the gap to the next column, in characters of the terminal."""


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:.5g}"
    return _cut_start(printable(" ".join(str(value).split())), MAX_CELL)


def _cut_start(text: str, max_length: int) -> str:
    """Return a text, or three dots as one letter and its end, in at most `max_length` letters.

    Names and paths differ at their end.
    """
    return text if len(text) <= max_length else f"…{text[len(text) - max_length + 1 :]}"


def _count_distinct_letters(names: Sequence[str]) -> int:
    """Return the least length to which `_cut_start` can cut all names so that none become equal."""
    num_names = len(set(names))
    length = 1
    while len({_cut_start(name, length) for name in names}) < num_names:
        length += 1
    return length
