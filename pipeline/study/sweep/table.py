"""The table of a sweep: the changed keys and the result of each job.

It is written again from the jobs' summaries after a job, by the process that ran it, and at the end
of the sweep. Since all jobs are read for it, a large table is left as it is for a while.
"""

from __future__ import annotations

import csv
import io
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
from pipeline.stages.record.run_directory import OVERRIDES, SUMMARY, written_at_ns
from pipeline.study.runs.ranking import is_better_larger, main_metric
from pipeline.study.sweep.amortization import write_amortisation
from pipeline.study.sweep.command import read_command
from pipeline.study.sweep.directory import find_jobs, read_overrides, read_state
from pipeline.study.sweep.job_summary import JobSummary, read_summary
from pipeline.training.target_metrics import OF_LABELS, OF_NUMBERS

TABLE = "sweep.csv"
SINK_SIZE, AMORTISATION = "train.sink_size", "amortisation"
JOBS_KEPT = 1 << 14
BYTES_PER_S = 750
"""Bytes of a table that may be rewritten each second."""
STUDY = "optuna"
"""The sweeper that prints the best trial itself, which may be an earlier run."""
NOT_SHOWN = frozenset({"modelled_sink_size", "modelled_bound", "exit_status"})
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
            **_of_targets(summary),
            "steps": summary.steps,
            **summary.time.model_dump(),
            **{f"modelled_{name}": value for name, value in summary.modelled.model_dump().items()},
            "exit_status": summary.exits_with,
            "reason": summary.reason,
        }


def _of_targets(summary: JobSummary) -> dict[str, float]:
    """The metrics of numbers and labels, where the job has any."""
    values = {name: summary.metric(name) for name in (*OF_NUMBERS, *OF_LABELS)}
    return {f"metrics.{name}": value for name, value in values.items() if value is not None}


def conclude(sweep_dir: Path) -> int:
    """Write and print the table; 0 when every job is done, 2 when a recipe was wrong, else 1.

    Raises RunError where there is no job, DataError where a job's files can't be read.
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
    values = ", ".join(f"{key}={value}" for key, value in best.changed.items())
    print(printable(f"best: job {best.job}, {metric} {value:.6g}: {values}"))


def read_jobs(sweep_dir: Path) -> list[JobRow]:
    """One row per job, in order. Raises DataError where a job's files can't be read."""
    return [_row(folder) for folder in find_jobs(sweep_dir)]


def _row(folder: Path) -> JobRow:
    changed = _overrides(folder, written_at_ns(folder / OVERRIDES))
    written_ns = written_at_ns(folder / SUMMARY)
    ended = _summary(folder, written_ns) if written_ns else None
    return JobRow(folder.name, changed, ended or JobSummary(status=read_state(folder)))


@lru_cache(JOBS_KEPT)
def _overrides(folder: Path, written_ns: int) -> Mapping[str, Any]:
    """The overrides that were written then: a process writes many tables of the same jobs."""
    return read_overrides(folder) or {}


@lru_cache(JOBS_KEPT)
def _summary(folder: Path, written_ns: int) -> JobSummary | None:
    """The summary that was written then."""
    return read_summary(folder)


def write_pictures(sweep_dir: Path, rows: Sequence[JobRow]) -> list[Path]:
    """Plot the step time over the sink size, where sizes were swept on an emulated device.

    Writes a picture for each combination of the other swept keys; returns their paths.
    """
    pictures: list[Path] = []
    for others, points in _curves(rows).items():
        number = f"_{len(pictures)}" if pictures else ""
        picture = sweep_dir / f"{AMORTISATION}{number}.html"
        title = "What longer sinks buy" + (f": {others}" if others else "")
        write_amortisation(tuple(points.items()), picture, title=title)
        pictures.append(picture)
    return pictures


def _curves(rows: Sequence[JobRow]) -> dict[str, dict[int, float]]:
    """Modelled step time in ms by sink size, for each combination of other keys with several."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        size, step_ms = row.summary.modelled.sink_size, row.summary.modelled.step_ms
        if SINK_SIZE in row.changed and size is not None and step_ms is not None:
            others = (f"{key}={value}" for key, value in row.changed.items() if key != SINK_SIZE)
            curves.setdefault(", ".join(others), {})[size] = step_ms
    return {others: points for others, points in curves.items() if len(points) > 1}


def update_table(sweep_dir: Path) -> None:
    """Rewrite `sweep.csv` as `write_table` does, unless that was done a moment ago.

    A table of n bytes stays for n / `BYTES_PER_S` seconds, three minutes for that of 1,000 jobs, so
    that tables take a small share of any sweep's time. Raises DataError as `read_jobs` does.
    """
    if _is_due(sweep_dir / TABLE):
        write_table(sweep_dir)


def _is_due(file: Path) -> bool:
    try:
        status = file.stat()
    except OSError:
        return True
    # A clock that was set back is no reason to wait.
    return not 0 <= time.time() - status.st_mtime < status.st_size / BYTES_PER_S


def write_table(sweep_dir: Path) -> None:
    """Rewrite `sweep.csv` atomically. Raises DataError as `read_jobs` does."""
    _write(read_jobs(sweep_dir), sweep_dir / TABLE)


def _write(rows: Sequence[JobRow], file: Path) -> None:
    cells = [row.cells() for row in rows]
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(cells), lineterminator="\n")
    writer.writeheader()
    writer.writerows(cells)
    write_whole(file, text.getvalue())


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def _show(jobs: Sequence[JobRow], file: Path) -> None:
    rows = [_shown(job) for job in jobs]
    filled = {name for row in rows for name, value in row.items() if value is not None}
    columns = [name for name in _columns(rows) if name in filled - NOT_SHOWN]
    heads = [_head(name) for name in columns]
    table = Table(*heads, title=printable(str(file)), box=SIMPLE_HEAD, padding=0)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    # Else rich would take text in brackets for markup.
    Console(markup=False).print(table)


def _shown(row: JobRow) -> dict[str, Any]:
    # The reasons of pruned trials are in the file; printed, they would fill the screen.
    cells = row.cells()
    return {**cells, "reason": None} if row.summary.status == "pruned" else cells


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
