"""The table of a sweep: what was changed in each job and what became of it.

It is made anew from the jobs' summaries after every job, by whichever process ran it.
"""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from rich.box import SIMPLE_HEAD
from rich.console import Console
from rich.table import Table

from pipeline.backends.ascend.amortisation import write_amortisation
from pipeline.run_directory import SUMMARY
from pipeline.sweep.directory import find_jobs, read_overrides, read_state
from pipeline.whole_file import write_whole

TABLE = "sweep.csv"
SINK_SIZE, AMORTISATION = "train.sink_size", "amortisation"
MODELLED = ("sink_size", "step_ms", "samples_per_s", "bound")
"""What the table has of `modelled`, on emulated devices."""
NOT_SHOWN = frozenset({"modelled_sink_size", "modelled_bound", "exit_status"})
"""Columns of the file that print has no room for."""


def conclude(sweep_dir: Path) -> int:
    """Write and show the table; 0 when every job is done, 2 when a recipe was wrong, else 1."""
    rows = read_jobs(sweep_dir)
    if rows:
        write_table(sweep_dir)
    _show(rows, sweep_dir / TABLE)
    for picture in write_pictures(sweep_dir, rows):
        print(f"what longer sinks buy, modelled: {picture}")
    return max((row["exit_status"] for row in rows), default=0)


def read_jobs(sweep_dir: Path) -> list[dict[str, Any]]:
    """One row per job, in order: what was changed, what became of it."""
    return [_row(folder) for folder in find_jobs(sweep_dir)]


def _row(folder: Path) -> dict[str, Any]:
    try:
        summary = json.loads((folder / SUMMARY).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        summary = {"status": read_state(folder)}
    metrics, times = summary.get("metrics", {}), summary.get("time", {})
    modelled = summary.get("modelled", {})
    return {
        "job": folder.name,
        **(read_overrides(folder) or {}),
        "status": summary["status"],
        "metrics.accuracy": metrics.get("accuracy"),
        "metrics.loss": metrics.get("loss"),
        "steps": summary.get("steps"),
        "step_ms": times.get("step_ms"),
        "train_s": times.get("train_s"),
        **{f"modelled_{name}": modelled.get(name) for name in MODELLED},
        "exit_status": summary.get("exit_status", int(summary["status"] != "done")),
        "reason": summary.get("reason"),
    }


def write_pictures(sweep_dir: Path, rows: Sequence[Mapping[str, Any]]) -> list[Path]:
    """Where sink sizes were swept on an emulated device, a step's time against them.

    A picture for each combination of the other keys that were swept.
    """
    pictures: list[Path] = []
    for others, points in _curves(sweep_dir, rows).items():
        number = f"_{len(pictures)}" if pictures else ""
        picture = sweep_dir / f"{AMORTISATION}{number}.html"
        title = "What longer sinks buy" + (f": {others}" if others else "")
        write_amortisation(tuple(points.items()), picture, title=title)
        pictures.append(picture)
    return pictures


def _curves(sweep_dir: Path, rows: Sequence[Mapping[str, Any]]) -> dict[str, dict[int, float]]:
    """Modelled ms by steps a sink, for each combination of the other keys that has several."""
    curves: dict[str, dict[int, float]] = {}
    for row in rows:
        if SINK_SIZE in row and row["modelled_step_ms"] is not None:
            changed = read_overrides(sweep_dir / row["job"]) or {}
            others = (f"{key}={value}" for key, value in changed.items() if key != SINK_SIZE)
            curve = curves.setdefault(", ".join(others), {})
            curve[row["modelled_sink_size"]] = row["modelled_step_ms"]
    return {others: points for others, points in curves.items() if len(points) > 1}


def _columns(rows: Sequence[Mapping[str, Any]]) -> list[str]:
    return list(dict.fromkeys(key for row in rows for key in row))


def write_table(sweep_dir: Path) -> None:
    """Rewrite `sweep.csv` as a whole."""
    rows = read_jobs(sweep_dir)
    text = io.StringIO()
    writer = csv.DictWriter(text, _columns(rows), lineterminator="\n")
    writer.writeheader()
    writer.writerows(rows)
    write_whole(sweep_dir / TABLE, text.getvalue())


def _show(jobs: Sequence[Mapping[str, Any]], file: Path) -> None:
    # Why a trial was pruned is in the file: told for most of them, it would fill the screen.
    rows = [{**job, "reason": None} if job["status"] == "pruned" else job for job in jobs]
    filled = {name for row in rows for name, value in row.items() if value is not None}
    columns = [name for name in _columns(rows) if name in filled - NOT_SHOWN]
    heads = [_head(name) for name in columns]
    table = Table(*heads, title=str(file), box=SIMPLE_HEAD, padding=0)
    for row in rows:
        table.add_row(*(_cell(row.get(column)) for column in columns))
    # Else what stands in brackets would be rich's markup.
    Console(markup=False).print(table)


def _head(column: str) -> str:
    """A column's name in words, which a narrow terminal sets one below another."""
    name = column.removeprefix("metrics.").replace("samples_per_s", "samples/s")
    return re.sub("[._]", " ", name)


def _cell(value: Any) -> str:
    if value is None:
        return ""
    if isinstance(value, float):
        return f"{value:,.0f}" if 1e4 <= value < 1e9 else f"{value:.4g}"
    text = " ".join(str(value).split())
    return text if len(text) <= 80 else f"{text[:77]}..."
