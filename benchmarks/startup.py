"""Start-up: seconds from the command to the first step, cold and warm, and what they go to.

    python -m benchmarks.startup --recipe lenet5_digits --rounds 5

Every run is a process of its own. A cold one starts with an empty cache folder, a warm one with
that which a cold one left; downloads are no part of it, name `--root` for a recipe that needs them.
Prints a Markdown table of medians; parts are those of `summary.json`, `time`. What is left is the
interpreter's start and end and whatever lies between the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from pipeline.runner.record.summary import START_UP

PACKAGES = ("jax", "jaxlib")
FIRST_STEP, WHOLE = "first step", "whole command"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", help="dataset.root")
    add_save(parser, "startup.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.steps=1")
    args = parser.parse_args()
    overrides = [f"+recipe={args.recipe}", *args.overrides]
    overrides += [f"dataset.root={args.root}"] if args.root else []
    measured: dict[str, list[dict[str, float]]] = {"cold": [], "warm": []}
    for _ in range(args.rounds):
        with tempfile.TemporaryDirectory() as cache:
            for runs in measured.values():
                runs.append(_measure(overrides, Path(cache)))
    publish(
        _report(f"--recipe {args.recipe} {shlex.join(args.overrides)}".rstrip(), measured),
        args.save,
    )


def _measure(overrides: Sequence[str], cache: Path) -> dict[str, float]:
    """Seconds of every part of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        where = [f"cache.root={cache}", f"hydra.run.dir={run_dir}"]
        command = [sys.executable, "-m", "pipeline", *overrides, *where]
        begun = time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=_environment())
        seconds = time.perf_counter() - begun
        if done.returncode:
            raise SystemExit(done.stderr)
        times = json.loads((run_dir / "summary.json").read_text())["time"]
    parts = {name: times[key] for name, key in START_UP.items()}
    other = times["first_step_s"] - sum(parts.values())
    return {**parts, "other": other, FIRST_STEP: times["first_step_s"], WHOLE: seconds}


def _environment() -> Mapping[str, str]:
    """This one, and the package found from wherever the run is."""
    return {**os.environ, "PYTHONPATH": str(Path(__file__).parents[1])}


def _report(what: str, measured: Mapping[str, Sequence[Mapping[str, float]]]) -> str:
    parts = list(measured["cold"][0])
    rows = [
        [cache, *(f"{statistics.median(run[part] for run in runs):.2f}" for part in parts)]
        for cache, runs in measured.items()
    ]
    return "\n".join(
        (
            heading("Start-up", f"python -m benchmarks.startup {what}", PACKAGES),
            f"Seconds, medians of {len(measured['cold'])} processes.\n",
            table(("cache", *parts), rows),
        )
    )


if __name__ == "__main__":
    main()
