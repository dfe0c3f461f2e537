"""Time how long a signal waits for its answer.

    python -m tests.signals [--signals 100] [--stops 20] [--evaluations 20]
    python -m tests.signals --moments 1000 [--processes 2]

A run of LeNet-5 in sinks of 1000 steps receives SIGUSR1 at random moments, each timed until the
checkpoint is on disk under its name. Then runs receive SIGTERM, timed until the process has ended
and saved its newest step. No evaluation and no other checkpoint comes in between. Then runs that
mostly evaluate receive SIGTERM.

With `--moments`, commands receive signals at random moments instead (tests/signal_moments.py).
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import sys
import tempfile
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np

from pipeline.checkpoint.checkpoint_folder import list_saved_steps
from tests import outcome
from tests.conftest import TINY
from tests.crash.lives import SINK_STEPS, find_run_dir, start
from tests.signal_moments import print_rows, send_signals

ENDLESS = [
    *TINY,
    "train.steps=10_000_000",
    f"train.sink_size={SINK_STEPS}",
    "eval.every_epochs=null",
]
EVALUATING = ["eval.every_steps=1", "++dataset.eval_size=200000"]
"""An evaluation of some seconds after every step."""
POLL_S = 0.001
PATIENCE_S = 60.0


def main() -> int:
    """Print p50, p99 and the longest wait. Raises AssertionError if an answer isn't as promised."""
    parser = argparse.ArgumentParser(prog="python -m tests.signals", description=__doc__)
    parser.add_argument("--signals", type=int, default=100, help="SIGUSR1, to one run")
    parser.add_argument("--stops", type=int, default=20, help="SIGTERM, to a run each")
    parser.add_argument("--evaluations", type=int, default=20, help="SIGTERM in one of a run each")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--dispatch-seconds", type=float, default=1.0)
    parser.add_argument("--moments", type=int, default=0, help="commands that get signals anywhere")
    parser.add_argument("--processes", type=int, default=2, help="commands at once")
    options = parser.parse_args()
    if options.moments:
        rows = send_signals(options.moments, options.seed, options.processes)
        print_rows(rows)
        return int(any(row.defects for row in rows.values()))
    draw = random.Random(options.seed)
    arguments = [f"train.dispatch_seconds={options.dispatch_seconds}"]
    with tempfile.TemporaryDirectory() as folder:
        saves = time_saves(Path(folder) / "saves", arguments, options.signals, draw)
        ends = [
            time_stop(Path(folder) / f"stop_{n}", arguments, draw) for n in range(options.stops)
        ]
        arguments += EVALUATING
        evaluation_ends = [
            time_stop(Path(folder) / f"evaluation_{n}", arguments, draw)
            for n in range(options.evaluations)
        ]
    print(f"train.dispatch_seconds={options.dispatch_seconds}, seed {options.seed}")
    print_seconds("SIGUSR1 until the checkpoint is on disk", saves)
    print_seconds("SIGTERM until the process has ended", ends)
    print_seconds("the same, in an evaluation", evaluation_ends)
    return 0


def time_saves(folder: Path, arguments: list[str], count: int, draw: random.Random) -> list[float]:
    """Return the seconds from each signal until there is another checkpoint."""
    process, run_dir = _start_training(folder, arguments)
    seconds = []
    for _ in range(count):
        time.sleep(draw.uniform(0, 1))
        seconds.append(_time_save(process, run_dir / "checkpoints"))
    process.kill()
    process.join()
    return seconds


def time_stop(folder: Path, arguments: list[str], draw: random.Random) -> float:
    """Return the seconds from SIGTERM to the end of the process; the last logged step is saved."""
    process, run_dir = _start_training(folder, arguments)
    time.sleep(draw.uniform(0, 2))
    start_s = time.monotonic()
    _send(process, signal.SIGTERM)
    process.join(PATIENCE_S)
    seconds = time.monotonic() - start_s
    last = outcome.metrics(run_dir)[-1]["step"]
    assert process.exitcode == 75
    assert outcome.read_summary(run_dir)["reason"] == "SIGTERM received"
    assert outcome.checkpoints(run_dir) == [last]
    return seconds


def print_seconds(title: str, seconds: list[float]) -> None:
    """Print a line with the count, the median, the 99th percentile and the maximum."""
    if not seconds:
        return
    median, p99 = np.percentile(seconds, [50, 99])
    spread = f"p50 {median:.2f} s  p99 {p99:.2f} s  max {max(seconds):.2f} s"
    print(f"{title:<42} n {len(seconds):>4}  {spread}")


def _start_training(folder: Path, arguments: list[str]) -> tuple[ForkServerProcess, Path]:
    """Start a run and wait until its first steps are in its log."""
    folder.mkdir(parents=True)
    process = start([*ENDLESS, *arguments], folder)
    deadline = time.monotonic() + PATIENCE_S
    while time.monotonic() < deadline and process.exitcode is None:
        run_dir = find_run_dir(folder)
        if run_dir is not None and _logs_steps(run_dir / "metrics.jsonl"):
            return process, run_dir
        time.sleep(POLL_S)
    raise AssertionError(f"{folder}: no step in {PATIENCE_S} s, exit {process.exitcode}")


def _logs_steps(metrics: Path) -> bool:
    return metrics.exists() and metrics.stat().st_size > 0


def _time_save(process: ForkServerProcess, root: Path) -> float:
    before = list_saved_steps(root)[-1:]
    start_s = time.monotonic()
    _send(process, signal.SIGUSR1)
    while list_saved_steps(root)[-1:] == before:
        assert process.exitcode is None
        assert time.monotonic() - start_s < PATIENCE_S
        time.sleep(POLL_S)
    return time.monotonic() - start_s


def _send(process: ForkServerProcess, number: signal.Signals) -> None:
    assert process.pid is not None
    os.kill(process.pid, number)


if __name__ == "__main__":
    sys.exit(main())
