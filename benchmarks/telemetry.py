"""The cost of a sink's telemetry: every step's record, from the device's rows to the files.

    python -m benchmarks.telemetry --steps 10000

The observers of a run get one sink of `--steps` steps, as from training. The training thread is
done once it has handed the rows over, the writer's thread once all are in the files: metrics.jsonl,
TensorBoard, the lines of run.log. Meanwhile nothing is trained. Every round has a new run
directory; opening its files and importing libraries don't count. Prints a Markdown table of
medians.
"""

from __future__ import annotations

import argparse
import io
import statistics
import tempfile
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

import numpy as np
from rich.console import Console

from benchmarks.measure import add_save, alternate, heading, publish, table
from pipeline import load_recipe
from pipeline.config.observer_settings import make_observer_settings
from pipeline.config.recipe import Recipe
from pipeline.core.reporter import WARNING, Reporter
from pipeline.engine.loop import SinkClock
from pipeline.engine.monitors.log_lines import METRICS, last_step
from pipeline.engine.monitors.observers import open_observers
from pipeline.engine.monitors.tensorboard_files import PREFIX
from pipeline.engine.schedule import RunSchedule
from pipeline.training.telemetry import Telemetry

PACKAGES = ("numpy", "tensorboardX")
TENSORBOARD = {"metrics.jsonl and TensorBoard": "true", "metrics.jsonl alone": "false"}
"""The written files, and `monitor.tensorboard` for them."""
NAMES = ("loss", "learning_rate", "grad_norm", "loss_scale", "skipped")
STEPS_PER_EPOCH = 100
SINK_S = 1.0
"""Both only change numbers in lines."""


@dataclass(frozen=True)
class Cost:
    """Costs of the telemetry of one sink."""

    training_thread_us: float
    writer_thread_ms: float
    written_bytes: int


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--steps", type=int, default=10_000, help="of the sink")
    parser.add_argument("--rounds", type=int, default=15)
    add_save(parser, "telemetry.md")
    args = parser.parse_args()
    turns = {
        name: partial(measure, _make_recipe(args.steps, tensorboard), make_rows(args.steps))
        for name, tensorboard in TENSORBOARD.items()
    }
    publish(report(args.steps, alternate(turns, args.rounds)), args.save)


def _make_recipe(steps: int, tensorboard: str) -> Recipe:
    sink = f"train.steps={steps}", f"train.sink_size={steps}"
    return load_recipe("lenet5_digits", [*sink, f"monitor.tensorboard={tensorboard}"])


def make_rows(steps: int) -> np.ndarray:
    """Return rows as a sink returns them, float32 (steps, 5).

    Losses, rates and norms have all their digits; the loss scale is 1, and no update is skipped.
    """
    rows = np.ones((steps, len(NAMES)), np.float32)
    rows[:, :3] = np.random.default_rng(0).random((steps, 3), np.float32)
    rows[:, -1] = 0
    return rows


def measure(recipe: Recipe, rows: np.ndarray) -> Cost:
    """Hand the rows of one sink to a run's observers, in a new directory.

    Ends the process if a step isn't written.
    """
    steps = len(rows)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        with (
            Reporter(folder, Console(file=io.StringIO())) as reporter,
            open_observers(
                make_observer_settings(recipe),
                folder,
                RunSchedule(steps, STEPS_PER_EPOCH, steps),
                0,
                reporter,
            ) as observers,
        ):
            monitor = observers.monitor
            clock = SinkClock()
            monitor.flush()
            started_at = time.perf_counter()
            telemetry = Telemetry.from_rows(0, rows, NAMES, NAMES[-1:])
            monitor.on_steps(telemetry, SINK_S)
            clock.add(telemetry, SINK_S)
            monitor.on_sink(clock.report(steps))
            handed_at = time.perf_counter()
            monitor.flush()
            written_at = time.perf_counter()
        thread_us = 1e6 * (handed_at - started_at)
        return Cost(thread_us, 1e3 * (written_at - handed_at), _sum_file_bytes(folder, steps))


def _sum_file_bytes(folder: Path, steps: int) -> int:
    """Return the size of the steps' files. Ends the process if the last step is missing."""
    log = (folder / "run.log").read_text(encoding="utf-8")
    if WARNING in log or last_step(folder / METRICS) != steps:
        raise SystemExit(f"benchmarks.telemetry: not all of {steps} steps was written\n{log}")
    files = [folder / METRICS, *folder.glob(f"{PREFIX}*")]
    return sum(file.stat().st_size for file in files)


def report(steps: int, costs: Mapping[str, Sequence[Cost]]) -> str:
    """Return Markdown: the table, the machine and the versions."""
    rows = []
    for name, rounds in costs.items():
        writing_ms = [cost.writer_thread_ms for cost in rounds]
        row = (
            name,
            f"{statistics.median(writing_ms):.1f}",
            f"{min(writing_ms):.1f} to {max(writing_ms):.1f}",
            f"{statistics.median(cost.training_thread_us for cost in rounds):.0f}",
            f"{statistics.median(cost.written_bytes for cost in rounds) / 1e6:.2f}",
        )
        rows.append(row)
    header = ("written", "writer's thread, ms", "min to max", "training thread, us", "files, MB")
    count = len(next(iter(costs.values())))
    command = f"python -m benchmarks.telemetry --steps {steps} --rounds {count}"
    head = heading(f"Telemetry of a sink of {steps:,} steps", command, PACKAGES)
    return f"{head}\nMedians of {count} rounds, alternating.\n\n{table(header, rows)}"


if __name__ == "__main__":
    main()
