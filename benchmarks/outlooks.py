"""When runs end, beside what they say before their first step.

    python -m benchmarks.outlooks --cifar DIR
    python -m benchmarks.outlooks --cifar DIR --rounds 3 --stop-after 180

Each run is a new process; the first round starts without times of earlier runs. A run that is
announced for longer than an hour is stopped with Ctrl-C `--stop-after` seconds after its outlook,
and its end is the time of its trained steps, times all of its steps.
Prints, per run, the first outlook and the corrected one, as the seconds that are left, against
the seconds that were left.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import Timer

from benchmarks.layouts import PACKAGES
from benchmarks.measure import add_save, heading, publish, table
from pipeline.core.files.value_text import format_duration

RUNS = (
    ("10 s", ("train.epochs=150",)),
    ("10 min", ("+recipe=gpt_text", "train.steps=1500")),
    ("5 days", ("+recipe=resnet50_cifar10",)),
)
"""Runs by their approximate length."""
LONG_S = 3600.0
"""Runs that are announced for longer are stopped."""
_SECONDS = {"s": 1.0, "ms": 1e-3, "min": 60.0, "h": 3600.0, "day": 86_400.0, "days": 86_400.0}
OUTLOOK = re.compile(r"outlook .* about ([\d.,]+) (\w+) a step, (.*) in all;")
_STEPS = re.compile(r"build .*?([\d,]+) steps")


@dataclass(frozen=True)
class Ended:
    """What a run announced, and when it ended."""

    announced_s: tuple[float, ...]
    """Seconds of all steps by each outlook."""
    real_s: float
    """Seconds from the first outlook to the end of the process."""


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--cifar", help="dataset.root of CIFAR-10")
    parser.add_argument("--rounds", type=int, default=2)
    parser.add_argument("--stop-after", type=float, default=180.0, help="seconds")
    parser.add_argument("--only", help="regular expression of lengths")
    add_save(parser, "outlooks.md")
    args = parser.parse_args()
    rows = []
    for length, overrides in RUNS:
        if args.only and not re.search(args.only, length):
            continue
        if any("cifar10" in override for override in overrides):
            if not args.cifar:
                continue
            overrides = (*overrides, f"dataset.root={args.cifar}")
        with tempfile.TemporaryDirectory() as folder:
            for round_number in range(args.rounds):
                ended = _run(overrides, Path(folder), round_number, args.stop_after)
                rows.append(_describe(length, round_number, ended))
                print(*rows[-1], sep="  ", file=sys.stderr, flush=True)
    head = ("run", "round", "announced", "corrected", "real", "announced / real")
    cifar = " --cifar DIR" if args.cifar else ""
    command = f"python -m benchmarks.outlooks{cifar} --rounds {args.rounds}"
    publish(f"{heading('Outlooks', command, PACKAGES)}\n{table(head, rows)}", args.save)


def _describe(length: str, round_number: int, ended: Ended) -> tuple[str, ...]:
    first, *others = ended.announced_s
    return (
        length,
        str(round_number + 1),
        format_duration(first),
        format_duration(others[-1]) if others else "",
        format_duration(ended.real_s),
        f"{first / ended.real_s:.2f}",
    )


def _run(overrides: Sequence[str], folder: Path, number: int, stop_after_s: float) -> Ended:
    """Run a recipe, and read the moments of its lines."""
    run_dir = folder / f"run{number}"
    command = [sys.executable, "-u", "-m", "pipeline", *overrides, f"hydra.run.dir={run_dir}"]
    environment = {**os.environ, "XDG_CACHE_HOME": str(folder / "cache"), "COLUMNS": "200"}
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment)
    assert process.stdout is not None
    announced: list[float] = []
    first_at = 0.0
    steps = 0
    for line in process.stdout:
        if match := _STEPS.match(line):
            steps = int(match[1].replace(",", ""))
        if match := OUTLOOK.match(line):
            announced.append(parse_duration(match[3]))
            first_at = first_at or time.perf_counter()
            if len(announced) == 1 and announced[0] > LONG_S:
                Timer(stop_after_s, process.send_signal, (signal.SIGINT,)).start()
    process.wait()
    if not announced:
        raise SystemExit(f"{' '.join(command)}: printed no outlook")
    real_s = time.perf_counter() - first_at
    done = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))["steps"]
    return Ended(tuple(announced), real_s * steps / done)


def parse_duration(text: str) -> float:
    """Return seconds: of `1.9 s`, `2 h 5 min` or `15.6 days`."""
    pairs = re.findall(r"([\d.,]+) (\w+)", text)
    return sum(float(value.replace(",", "")) * _SECONDS[unit] for value, unit in pairs)


if __name__ == "__main__":
    main()
