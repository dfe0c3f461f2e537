"""Growth of costs with the number of runs, jobs, steps, samples and parameters.

    python -m benchmarks.scale
    python -m benchmarks.scale --rows planning table --save

Each row is measured at several sizes, if possible in processor time, which other users of the
machine change little. The growth exponent is the slope of a line through the logarithms of size and
cost: 0 is constant, 1 proportional, 2 quadratic.
"""

from __future__ import annotations

import argparse
import io
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, redirect_stdout
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks import scale_rows as rows
from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe

PACKAGES = ("hydra-core", "numpy")
SUMMARY = {
    "status": "done",
    "metrics": {"accuracy": 0.9, "loss": 0.1},
    "steps": 100,
    "time": {"step_ms": 1.5, "train_s": 0.2},
}


@dataclass(frozen=True)
class Row:
    """A cost at several sizes."""

    what: str
    sizes: tuple[int, ...]
    measure: Callable[[int], float]
    goal: str
    unit: str = "s"


@contextmanager
def measure_processor_s() -> Iterator[list[float]]:
    """Measure the body; the seconds are in the list afterwards."""
    seconds: list[float] = []
    before_s = time.process_time()
    yield seconds
    seconds.append(time.process_time() - before_s)


@contextmanager
def enter_new_folder() -> Iterator[Path]:
    """Work in a new folder, which is removed afterwards."""
    before = Path.cwd()
    folder = Path(tempfile.mkdtemp(prefix="scale-"))
    os.chdir(folder)
    try:
        yield folder
    finally:
        os.chdir(before)
        shutil.rmtree(folder)


def find_resumed_run(runs: int) -> float:
    """Find the run to resume among finished runs; return seconds."""
    from pipeline.stages.record.recorded_recipe import write_recipe
    from pipeline.stages.runner.resumed_run import find_run_to_resume

    recipe = load_recipe("lenet5_digits", ["train.resume=auto"])
    with enter_new_folder() as folder:
        first = folder / "outputs" / "2026-01-01" / "0"
        first.mkdir(parents=True)
        write_recipe(first, recipe)
        (first / "summary.json").write_text(_make_summary())
        for number in range(1, runs):
            shutil.copytree(first, first.with_name(str(number)))
        with measure_processor_s() as seconds:
            assert find_run_to_resume(recipe) is None
    return seconds[0]


def _make_summary() -> str:
    """Return a summary as long as the summaries of real runs."""
    numbers = {f"class_{number}": number / 7 for number in range(30)}
    metrics = {"accuracy": 0.9, "precision": numbers, "recall": numbers, "f1": numbers}
    return json.dumps({**SUMMARY, "metrics": metrics, "versions": {"jax": "0.10.2"}}, indent=2)


def plan_jobs(jobs: int) -> float:
    """Plan the jobs of a new grid over learning rates and sink sizes; return seconds."""
    from pipeline.cli import train
    from pipeline.study.sweep import grid
    from pipeline.study.sweep import table as sweep_table

    rates = ",".join(str(number / 10**6) for number in range(1, jobs // 2 + 1))
    spent_s: list[float] = []
    before = grid.plan_grid, grid.run_all, sweep_table.conclude_sweep

    def plan(*args: Any, **options: Any) -> Any:
        with measure_processor_s() as seconds:
            jobs = before[0](*args, **options)
        spent_s.extend(seconds)
        return jobs

    keys = [f"train.optimizer.lr={rates}", "train.sink_size=10,100", "hydra.sweep.dir=sweep"]
    patched: Any = grid, sweep_table
    patched[0].plan_grid = plan
    patched[0].run_all = lambda *_: None
    patched[1].conclude_sweep = lambda *_, **__: 0
    try:
        with enter_new_folder():
            train.main(["-m", "+recipe=lenet5_digits", *keys])
    finally:
        patched[0].plan_grid, patched[0].run_all, patched[1].conclude_sweep = before
    return spent_s[0]


def write_tables(jobs: int) -> float:
    """Write all tables of a sweep of jobs of a second, the last one too; return seconds."""
    from pipeline.study.sweep.directory import write_overrides
    from pipeline.study.sweep.table import TABLE, conclude_sweep, update_table

    spent_s = 0.0
    with enter_new_folder() as folder:
        for number in range(jobs):
            job = folder / str(number)
            job.mkdir()
            write_overrides(job, {"train.optimizer.lr": number / 1e4, "seed": number})
        for number in range(jobs):
            (folder / str(number) / "summary.json").write_text(json.dumps(SUMMARY))
            with measure_processor_s() as seconds:
                update_table(folder)
            spent_s += seconds[0]
            modified_at = (folder / TABLE).stat().st_mtime - 1
            os.utime(folder / TABLE, (modified_at, modified_at))
        with redirect_stdout(io.StringIO()), measure_processor_s() as seconds:
            conclude_sweep(folder)
    return spent_s + seconds[0]


def open_resumed_log(steps: int) -> float:
    """Open metrics.jsonl of a number of steps at a checkpoint's mark; return seconds."""
    from pipeline.engine.monitors.metrics_log import MetricsLog
    from pipeline.engine.schedule import RunSchedule
    from pipeline.training.telemetry import Telemetry

    schedule = RunSchedule(2 * steps, 100, 100)
    block = 10_000
    names = ("loss", "learning_rate", "grad_norm")
    rows = np.random.default_rng(0).random((block, 3), np.float32)
    columns = dict(zip(names, rows.T, strict=True))
    columns |= {"loss_scale": np.ones(block, np.float32), "skipped": np.zeros(block, bool)}
    with enter_new_folder() as folder:
        log = MetricsLog(folder, schedule, 0, {})
        for start in range(0, steps, block):
            log.on_steps(Telemetry(start, columns), 1.0)
            log.flush()
        marks = log.marks(steps)
        log.close()
        with measure_processor_s() as seconds:
            resumed = MetricsLog(folder, schedule, steps, marks)
        resumed.close()
    return seconds[0]


ROWS = {
    "sweep_memory": Row(
        "1 memory of a sweep in one process, by jobs", (8, 20), rows.measure_sweep, "< 50 MB", "MB"
    ),
    "second_job": Row(
        "2 compiling a ResNet with oneDNN again, by blocks a stage",
        (1, 2),
        rows.compile_second_job,
        "< 2 s",
    ),
    "resume_auto": Row(
        "3 train.resume=auto, by finished runs", (200, 2000), find_resumed_run, "< 0.3 s"
    ),
    "initialisation": Row(
        "4 drawing a ViT of 24 blocks, by its width (300 M parameters at 1,024)",
        (192, 384, 768),
        rows.initialise,
        "< 8 s at 300 M",
    ),
    "compiling_init": Row(
        "5 compiling the initialisation of a ViT, by blocks",
        (6, 12, 24),
        rows.compile_initialisation_s,
        "< 2 s",
    ),
    "streaming": Row(
        "6 reading records in batches, by samples",
        (2000, 20_000),
        rows.read_records,
        "< 22 us a sample",
        "us",
    ),
    "first_window": Row(
        "7 first window of a stream, by samples", (8192, 65_536), rows.read_first_window, "< 1 s"
    ),
    "speed_told": Row(
        "8 speed that is told against the true one, by steps",
        (2000, 8000),
        rows.compare_speeds,
        "1",
        "x",
    ),
    "planning": Row("9 planning a grid, by jobs", (20, 100, 400), plan_jobs, "< 10 ms a job"),
    "table": Row("10 sweep.csv in all, by jobs", (100, 1000), write_tables, "< 3 s at 1,000"),
    "resumed_log": Row(
        "11 opening metrics.jsonl to resume, by steps",
        (100_000, 1_000_000),
        open_resumed_log,
        "< 0.1 s",
    ),
    "saving": Row(
        "12 saving a state, by its numbers",
        (1 << 24, 1 << 26, 1 << 28),
        rows.save,
        "1 or what the disk gives",
        "GB/s",
    ),
    "restoring": Row(
        "12 reading a state, by its numbers",
        (1 << 24, 1 << 26, 1 << 28),
        rows.restore,
        "1 or what the disk gives",
        "GB/s",
    ),
    "npz": Row(
        "13 peak memory of an .npz, by samples", (100_000, 400_000), rows.measure_npz, "1.15", "x"
    ),
    "order": Row(
        "14 order of a window, by samples",
        (2_000_000, 10_000_000, 100_000_000),
        rows.order_samples,
        "< 1 ms",
        "ms",
    ),
    "single_read": Row(
        "15 one sample by its index, by samples", (2000, 20_000), rows.read_single, "flat", "us"
    ),
    "processors": Row(
        "16 processors of jobs of submitit_local against those there are, by jobs",
        (2, 8),
        rows.count_shared_processors,
        "1",
        "x",
    ),
}
"""The rows by name."""


def exponent(sizes: Sequence[int], costs: Sequence[float]) -> float:
    """Return the slope of a line through the logarithms."""
    floor = 1e-6
    logs = np.log(np.maximum(np.array([sizes, costs], float), floor))
    return float(np.polyfit(logs[0], logs[1], 1)[0])


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--rows", nargs="+", choices=ROWS, default=list(ROWS))
    add_save(parser, "scale.md")
    args = parser.parse_args()
    lines = []
    for name in args.rows:
        row = ROWS[name]
        costs = [row.measure(size) for size in row.sizes]
        cells = ", ".join(
            f"{size:,}: {cost:.3f} {row.unit}" for size, cost in zip(row.sizes, costs, strict=True)
        )
        lines.append([row.what, cells, f"{exponent(row.sizes, costs):.2f}", row.goal])
        print(f"{row.what}: {cells}", file=sys.stderr)
    head = heading("Scale", f"python -m benchmarks.scale --rows {' '.join(args.rows)}", PACKAGES)
    measured = table(["cost", "measured", "growth exponent", "goal"], lines)
    publish(f"{head}\nLoad {os.getloadavg()[2]:.0f}.\n\n{measured}", args.save)


if __name__ == "__main__":
    main()
