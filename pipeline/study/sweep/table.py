"""Table of a sweep: the changed keys and the result of each job.

It is rewritten from the summaries of all jobs after a job, unless it is large and was rewritten
recently, and at the end of the sweep.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from statistics import fmean
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import RunError, printable, shorten
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.csv_file import format_csv
from pipeline.core.files.value_text import count_noun
from pipeline.core.pages.charts import (
    draw_frame,
    format_points,
    make_horizontal_axis,
    make_vertical_axis,
)
from pipeline.core.pages.page import Charts, Drawing, Page, Section, render_page
from pipeline.stages.record.member_runs import find_jobs
from pipeline.stages.record.run_directory import OVERRIDES, SUMMARY, read_written_at_ns
from pipeline.study.population.groups import FOLD
from pipeline.study.runs.ranking import is_larger_better, main_metric, print_ties
from pipeline.study.sweep.directory import (
    JobSummary,
    format_changed,
    read_command,
    read_overrides,
    read_state,
    read_summary,
)
from pipeline.study.sweep.verdict import SWEEPER as PAIRS
from pipeline.study.sweep.verdict import PairedVerdict, read_verdict

TABLE = "sweep.csv"
SINK_SIZE = "train.sink_size"
AMORTISATION = "amortisation"
CACHED_JOBS = 1 << 14
"""Number of jobs whose files stay in memory, so that the next table reads only new files."""
BYTES_PER_S = 750
"""Average rate at which a table may be rewritten."""
STUDY = "optuna"
"""The sweeper that prints the best trial itself, which may be an earlier run."""
HIDDEN_COLUMNS = re.compile(
    r"modelled_(sink_size|bound)|exit_status|metrics\.(train_\w+|top5|precision|recall|f1)"
)
"""Columns of the file that are not printed, to save space."""
NO_METRICS = frozenset({"count"})
"""Figures of an evaluation that are no columns."""


@dataclass(frozen=True)
class JobRow:
    """A job with its changed keys and its result."""

    job: str
    changed: Mapping[str, Any]
    summary: JobSummary

    def cells(self) -> dict[str, Any]:
        """Return the values by column, the job and its changed keys first."""
        summary = self.summary
        metrics = {name: summary.metric(name) for name in summary.metrics if name not in NO_METRICS}
        return {
            "job": self.job,
            **self.changed,
            "status": summary.status,
            # These columns are first, also if the first job has no metrics.
            "metrics.accuracy": summary.metric("accuracy"),
            "metrics.loss": summary.metric("loss"),
            **{f"metrics.{name}": value for name, value in metrics.items() if value is not None},
            "steps": summary.steps,
            **summary.time.model_dump(),
            **{f"modelled_{name}": value for name, value in summary.modelled.model_dump().items()},
            "exit_status": summary.exits_with,
            "reason": summary.reason,
        }


def conclude_sweep(sweep_dir: Path, *, is_shared: bool = False) -> int:
    """Write the table and pictures, print the results, and return the largest exit status of a job.

    With `is_shared`, processes of a launcher share the jobs, and the jobs that others still run are
    left out: launchers end all processes when a status isn't 0. Raises RunError without a job,
    and DataError if a job's files can't be read.
    """
    rows = read_jobs(sweep_dir)
    if not rows:
        raise RunError(f"{sweep_dir}: has no job of a sweep")
    _write_rows(rows, sweep_dir / TABLE)
    _print_rows(rows, sweep_dir / TABLE)
    _write_conclusion(sweep_dir, rows)
    if is_shared:
        rows = [row for row in rows if row.summary.status != "running"]
    return max((row.summary.exits_with for row in rows), default=0)


def _write_conclusion(sweep_dir: Path, rows: Sequence[JobRow]) -> None:
    """Write the pictures, and print their paths and the verdict or the best job of a sweep."""
    for picture in write_pictures(sweep_dir, rows):
        print(printable(f"modelled gain of longer sinks: {picture}"))
    command = read_command(sweep_dir)
    sweeper = None if command is None else command.sweeper
    if sweeper is not None and sweeper.name == PAIRS:
        verdict = read_verdict(sweep_dir, (sweeper.model_extra or {}).get("metric"))
        print(f"\n{verdict}")
        if isinstance(verdict, PairedVerdict) and (line := verdict.describe_split()):
            print(line)
    elif sweeper is None or sweeper.name != STUDY:
        _print_best(rows)


def _print_best(rows: Sequence[JobRow]) -> None:
    """Print the best job that is done, or of several folds the best mean, if any has a metric."""
    done = [row for row in rows if row.summary.status == "done"]
    metric = main_metric([row.summary.numbers() for row in done])
    if metric is None:
        return
    values = [(row, row.summary.numbers().get(metric)) for row in done]
    rated_rows = [(row, value) for row, value in values if value is not None]
    choose = max if is_larger_better(metric) else min
    if any(FOLD in row.changed for row in rows):
        _print_best_mean(rated_rows, metric)
        return
    best, value = choose(rated_rows, key=lambda rated_row: rated_row[1])
    print(printable(f"best: job {best.job}, {metric} {value:.6g}: {format_changed(best.changed)}"))
    print_ties([(row.changed, value) for row, value in rated_rows], metric)


def _print_best_mean(rated_rows: Sequence[tuple[JobRow, float]], metric: str) -> None:
    """Print the best mean of a metric over folds, unless jobs differ by their folds alone. Settings
    without a metric of each fold aren't compared."""
    by_settings: dict[str, dict[Any, float]] = {}
    for row, value in rated_rows:
        settings = {key: value for key, value in row.changed.items() if key != FOLD}
        by_settings.setdefault(format_changed(settings), {})[row.changed.get(FOLD)] = value
    folds = {fold for values in by_settings.values() for fold in values}
    means = {
        name: fmean(values.values())
        for name, values in by_settings.items()
        if values.keys() == folds
    }
    if means and set(by_settings) != {""}:
        best = (max if is_larger_better(metric) else min)(means, key=means.__getitem__)
        over = count_noun(len(folds), "fold")
        print(printable(f"best: mean {metric} {means[best]:.6g} of {over}: {best}"))


def read_jobs(sweep_dir: Path) -> list[JobRow]:
    """Return a row per job, in order. Raises DataError if a job's files can't be read."""
    rows = []
    for folder in find_jobs(sweep_dir):
        changed = _read_once(read_overrides, folder, read_written_at_ns(folder / OVERRIDES)) or {}
        written_ns = read_written_at_ns(folder / SUMMARY)
        ended = _read_once(read_summary, folder, written_ns) if written_ns else None
        rows.append(JobRow(folder.name, changed, ended or JobSummary(status=read_state(folder))))
    return rows


@lru_cache(2 * CACHED_JOBS)
def _read_once(read: Callable[[Path], Any], folder: Path, written_ns: int) -> Any:
    """Read a file of a job, whose result is cached until the time of the file changes."""
    return read(folder)


def write_pictures(sweep_dir: Path, rows: Sequence[JobRow]) -> list[Path]:
    """Plot the step time against the sink size, if sizes were swept on an emulated device.

    Writes a picture for each combination of the other swept keys, and returns their paths.
    """
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        size = row.summary.modelled.sink_size
        step_ms = row.summary.modelled.step_ms
        if SINK_SIZE in row.changed and size is not None and step_ms is not None:
            fixed = {key: value for key, value in row.changed.items() if key != SINK_SIZE}
            curves.setdefault(format_changed(fixed), {})[size] = step_ms
    pictures: list[Path] = []
    for text, points in curves.items():
        if len(points) > 1:
            number = f"_{len(pictures)}" if pictures else ""
            pictures.append(sweep_dir / f"{AMORTISATION}{number}.html")
            title = "Gain of longer sinks" + (f": {text}" if text else "")
            write_amortisation(sorted(points.items()), pictures[-1], title)
    return pictures


def write_amortisation(points: Sequence[tuple[int, float]], path: Path, title: str) -> None:
    """Write an HTML page with a drawing of modelled step times.

    `points` are two or more (sink size in steps, ms a step), the smallest size first.
    """
    first, first_ms = points[0]
    last, last_ms = points[-1]
    summary = (
        f"A step takes {first_ms:.3g} ms in sinks of {first:,} and {last_ms:.3g} ms in sinks of "
        f"{last:,}: {first_ms / last_ms:.2f} times as fast."
    )
    sections = [
        Section("Milliseconds a step, by steps per launch", "", [Charts([_draw_points(points)])])
    ]
    footer = "All times are modelled, not measured on a device."
    page = Page("amortisation", title, summary, sections, footer=footer)
    write_whole(path, render_page(page))


def _draw_points(points: Sequence[tuple[int, float]]) -> Drawing:
    """Draw the times of steps against the logarithm of their sink sizes."""
    sizes = {math.log10(size): f"{size:,}" for size, _ in points}
    margin = 0.1 * (max(sizes) - min(sizes))
    x = make_horizontal_axis(min(sizes) - margin, max(sizes) + margin)
    y = make_vertical_axis(0, max(ms for _, ms in points) * 1.08)
    chart = draw_frame("Time of a step against sink size", x, y, "steps per launch", sizes)
    places = [(x.to_pixel(math.log10(size)), y.to_pixel(ms)) for size, ms in points]
    chart.add("polyline", "curve blue", points=format_points(places))
    for (size, ms), (x_px, y_px) in zip(points, places, strict=True):
        chart.add("circle", "blue", tip=f"sink of {size}: {ms:.3f} ms", cx=x_px, cy=y_px, r=3.5)
        chart.add("text", "ink", f"{ms:.3g}", x=x_px + 5, y=y_px - 7)
    return chart


def update_table(sweep_dir: Path) -> None:
    """Rewrite `sweep.csv` unless it was written recently.

    A table of n bytes isn't rewritten for n / `BYTES_PER_S` seconds, which are three minutes for
    1,000 jobs. So tables take a small share of a sweep's time. Raises DataError if a job's files
    can't be read.
    """
    try:
        status = (sweep_dir / TABLE).stat()
        # A clock that was set back isn't a reason to wait.
        is_recent = 0 <= time.time() - status.st_mtime < status.st_size / BYTES_PER_S
    except OSError:
        is_recent = False
    if not is_recent:
        write_table(sweep_dir)


def write_table(sweep_dir: Path) -> None:
    """Rewrite `sweep.csv`. Raises DataError if a job's files can't be read."""
    _write_rows(read_jobs(sweep_dir), sweep_dir / TABLE)


def _write_rows(rows: Sequence[JobRow], file: Path) -> None:
    """Replace the table as a whole, so that a reader never sees half of it."""
    cells = [row.cells() for row in rows]
    columns = _list_columns(cells)
    write_whole(file, format_csv({name: row.get(name) for name in columns} for row in cells))


def _list_columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _print_rows(jobs: Sequence[JobRow], file: Path) -> None:
    rows = [job.cells() for job in jobs]
    for row in rows:
        # The reasons of pruned trials would fill the screen, so only the file has them.
        if row["status"] == "pruned":
            row["reason"] = None
    filled = {name for row in rows for name, value in row.items() if value is not None}
    shown = {name for name in filled if not HIDDEN_COLUMNS.fullmatch(name)}
    columns = [name for name in _list_columns(rows) if name in shown]
    table = Table(title=printable(str(file)), box=SIMPLE_HEAD, padding=0)
    for name in columns:
        table.add_column(_format_head(name))
    for row in rows:
        table.add_row(*(_format_cell(row.get(column)) for column in columns))
    # With markup, rich would interpret text in brackets.
    Console(markup=False).print(table)


def _format_head(column: str) -> str:
    """Return a column's name as words, which can be wrapped in a narrow terminal."""
    name = column.removeprefix("metrics.").replace("samples_per_s", "samples/s")
    return printable(re.sub("[._]", " ", name))


def _format_cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= abs(value) < 1e9 else f"{value:.4g}"
    return shorten(printable(" ".join(str(value).split())), 80)
