"""The table of a sweep: the changed keys and the result of each job.

It is written again from the jobs' summaries after a job, by the process that ran it, and at the end
of the sweep. Since all jobs are read for it, a large table is left as it is for a while.
"""

from __future__ import annotations

import math
import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.core.errors import RunError, printable
from pipeline.core.files.atomic_write import write_whole
from pipeline.core.files.csv_file import csv_text
from pipeline.core.pages.charts import (
    draw_frame,
    format_points,
    make_horizontal_axis,
    make_vertical_axis,
)
from pipeline.core.pages.drawing import Drawing
from pipeline.core.pages.page import Charts, Page, Section, render_page
from pipeline.stages.record.run_directory import OVERRIDES, SUMMARY, read_written_at_ns
from pipeline.study.runs.ranking import is_better_larger, main_metric
from pipeline.study.sweep.command import read_command
from pipeline.study.sweep.directory import (
    JobSummary,
    changed_text,
    find_jobs,
    read_overrides,
    read_state,
    read_summary,
)
from pipeline.training.target_metrics import LABEL_METRICS, NUMBER_METRICS

TABLE = "sweep.csv"
SINK_SIZE = "train.sink_size"
AMORTISATION = "amortisation"
CACHED_JOBS = 1 << 14
BYTES_PER_S = 750
"""Bytes of a table that may be rewritten each second."""
STUDY = "optuna"
"""The sweeper that prints the best trial itself, which may be an earlier run."""
HIDDEN_COLUMNS = frozenset({"modelled_sink_size", "modelled_bound", "exit_status"})
"""Columns of the file that are not printed, for want of room."""


@dataclass(frozen=True)
class JobRow:
    """A job with its changed keys and its result."""

    job: str
    changed: Mapping[str, Any]
    summary: JobSummary

    def cells(self) -> dict[str, Any]:
        """The values by column; the changed keys come first."""
        summary = self.summary
        return {
            "job": self.job,
            **self.changed,
            "status": summary.status,
            "metrics.accuracy": summary.metric("accuracy"),
            "metrics.loss": summary.metric("loss"),
            # The metrics of numbers and labels, if the job has any.
            **{
                f"metrics.{name}": value
                for name in (*NUMBER_METRICS, *LABEL_METRICS)
                if (value := summary.metric(name)) is not None
            },
            "steps": summary.steps,
            **summary.time.model_dump(),
            **{f"modelled_{name}": value for name, value in summary.modelled.model_dump().items()},
            "exit_status": summary.exits_with,
            "reason": summary.reason,
        }


def conclude(sweep_dir: Path) -> int:
    """Write and print the table; 0 when every job is done, 2 when a recipe was wrong, else 1.

    Raises RunError if there is no job, DataError if a job's files can't be read.
    """
    rows = read_jobs(sweep_dir)
    if not rows:
        raise RunError(f"{sweep_dir}: the sweep has no job")
    _write(rows, sweep_dir / TABLE)
    _show(rows, sweep_dir / TABLE)
    for picture in write_pictures(sweep_dir, rows):
        print(printable(f"what longer sinks buy, modelled: {picture}"))
    command = read_command(sweep_dir)
    if command is None or command.sweeper.name != STUDY:
        _print_best(rows)
    return max(row.summary.exits_with for row in rows)


def _print_best(rows: Sequence[JobRow]) -> None:
    """Print the best job that is done, if any has a metric."""
    done = [row for row in rows if row.summary.status == "done"]
    metric = main_metric([row.summary.numbers() for row in done])
    if metric is None:
        return
    rated = [
        (row.summary.numbers()[metric], row) for row in done if metric in row.summary.numbers()
    ]
    choose = max if is_better_larger(metric) else min
    value, best = choose(rated, key=lambda pair: pair[0])
    print(printable(f"best: job {best.job}, {metric} {value:.6g}: {changed_text(best.changed)}"))


def read_jobs(sweep_dir: Path) -> list[JobRow]:
    """One row per job, in order. Raises DataError if a job's files can't be read."""
    rows = []
    for folder in find_jobs(sweep_dir):
        changed = _overrides(folder, read_written_at_ns(folder / OVERRIDES))
        written_ns = read_written_at_ns(folder / SUMMARY)
        ended = _summary(folder, written_ns) if written_ns else None
        rows.append(JobRow(folder.name, changed, ended or JobSummary(status=read_state(folder))))
    return rows


@lru_cache(CACHED_JOBS)
def _overrides(folder: Path, written_ns: int) -> Mapping[str, Any]:
    """The overrides that were written then: a process writes many tables of the same jobs."""
    return read_overrides(folder) or {}


@lru_cache(CACHED_JOBS)
def _summary(folder: Path, written_ns: int) -> JobSummary | None:
    """The summary that was written then."""
    return read_summary(folder)


def write_pictures(sweep_dir: Path, rows: Sequence[JobRow]) -> list[Path]:
    """Plot the step time over the sink size, if sizes were swept on an emulated device.

    Writes a picture for each combination of the other swept keys; returns their paths.
    """
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        size = row.summary.modelled.sink_size
        step_ms = row.summary.modelled.step_ms
        if SINK_SIZE in row.changed and size is not None and step_ms is not None:
            fixed = {key: value for key, value in row.changed.items() if key != SINK_SIZE}
            curves.setdefault(changed_text(fixed), {})[size] = step_ms
    pictures: list[Path] = []
    for text, points in curves.items():
        if len(points) > 1:
            number = f"_{len(pictures)}" if pictures else ""
            pictures.append(sweep_dir / f"{AMORTISATION}{number}.html")
            title = "What longer sinks buy" + (f": {text}" if text else "")
            write_amortisation(tuple(points.items()), pictures[-1], title)
    return pictures


def write_amortisation(
    points: Sequence[tuple[int, float]], path: Path, title: str = "What longer sinks buy"
) -> None:
    """Write modelled steps in ms, by sink size, as an HTML page with one drawing.

    Raises:
        ValueError: no point, a sink of no step, or a time that is not above zero and finite.
    """
    if not points:
        raise ValueError("no sink size to draw")
    for size, ms in points:
        if size < 1 or not (math.isfinite(ms) and ms > 0):
            raise ValueError(f"sink of {size} steps at {ms} ms: both should be above zero")
    points = sorted(points)
    first, first_ms = points[0]
    last, last_ms = points[-1]
    words = (
        f"A step takes {first_ms:.3g} ms in sinks of {first:,} and {last_ms:.3g} ms in sinks of "
        f"{last:,}: {first_ms / last_ms:.2f} times as fast."
    )
    sections = [Section("Milliseconds a step, by steps per launch", "", [Charts([_draw(points)])])]
    footer = "All times are modelled, none was measured on a device."
    page = Page("amortisation", title, words, sections, footer=footer)
    write_whole(path, render_page(page))


def _draw(points: Sequence[tuple[int, float]]) -> Drawing:
    """Draw the points over the logarithm of their sink sizes."""
    sizes = {math.log10(size): f"{size:,}" for size, _ in points}
    aside = 0.1 * (max(sizes) - min(sizes)) or 0.5
    x = make_horizontal_axis(min(sizes) - aside, max(sizes) + aside)
    y = make_vertical_axis(0, max(ms for _, ms in points) * 1.08)
    chart = draw_frame("Time of a step against sink size", x, y, "steps per launch", sizes)
    places = [(x.place(math.log10(size)), y.place(ms)) for size, ms in points]
    chart.add("polyline", "curve blue", points=format_points(places))
    for (size, ms), (across, up) in zip(points, places, strict=True):
        chart.add("circle", "blue", tip=f"sink of {size}: {ms:.3f} ms", cx=across, cy=up, r=3.5)
        chart.add("text", "ink", f"{ms:.3g}", x=across + 5, y=up - 7)
    return chart


def update_table(sweep_dir: Path) -> None:
    """Rewrite `sweep.csv` as `write_table` does, unless that was done a moment ago.

    A table of n bytes stays for n / `BYTES_PER_S` seconds, three minutes for 1,000 jobs, so that
    tables take a small share of any sweep's time. Raises DataError as `read_jobs` does.
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
    """Rewrite `sweep.csv` atomically. Raises DataError as `read_jobs` does."""
    _write(read_jobs(sweep_dir), sweep_dir / TABLE)


def _write(rows: Sequence[JobRow], file: Path) -> None:
    cells = [row.cells() for row in rows]
    columns = _columns(cells)
    write_whole(file, csv_text({name: row.get(name) for name in columns} for row in cells))


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _show(jobs: Sequence[JobRow], file: Path) -> None:
    # The reasons of pruned trials are in the file; printed, they would fill the screen.
    rows = [
        {**job.cells(), **({"reason": None} if job.summary.status == "pruned" else {})}
        for job in jobs
    ]
    filled = {name for row in rows for name, value in row.items() if value is not None}
    columns = [name for name in _columns(rows) if name in filled - HIDDEN_COLUMNS]
    table = Table(title=printable(str(file)), box=SIMPLE_HEAD, padding=0)
    for name in columns:
        table.add_column(_head(name))
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    # Else rich would take text in brackets for markup.
    Console(markup=False).print(table)


def _head(column: str) -> str:
    """A column's name as words, which can be wrapped in a narrow terminal."""
    name = column.removeprefix("metrics.").replace("samples_per_s", "samples/s")
    return printable(re.sub("[._]", " ", name))


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= value < 1e9 else f"{value:.4g}"
    text = printable(" ".join(str(value).split()))
    return text if len(text) <= 80 else f"{text[:77]}..."
