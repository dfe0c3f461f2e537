"""Start-up: seconds from the command to the first step, cold and warm, and what they go to.

    python -m benchmarks.startup --recipe lenet5_digits --rounds 5
    python -m benchmarks.startup --against ../another/checkout

Every run is a process of its own. A cold one starts with an empty cache folder, a warm one with
that which a cold one left; downloads are no part of it, name `--root` for a recipe that needs them.
Python finds its byte code, as in every start but the first after an installation. With `--against`
the commands of another checkout have their turn after each of these, on the same machine.
Prints a Markdown table of medians; parts are those of `summary.json`, `time`. What is left is the
interpreter's start and end and whatever lies between the parts.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import shlex
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from pipeline.stages.record.summary import START_UP

PACKAGES = ("jax", "jaxlib")
FIRST_STEP, WHOLE, PROCESSOR = "first step", "whole command", "of the processor"
OWN = Path(__file__).parents[1]
Measured = Mapping[tuple[str, str], Sequence[Mapping[str, float]]]
"""Runs by the state of the cache and by checkout."""


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--root", help="dataset.root")
    parser.add_argument("--against", type=Path, help="another checkout, measured in turn")
    add_save(parser, "startup.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.steps=1")
    args = parser.parse_args()
    overrides = [f"+recipe={args.recipe}", *args.overrides]
    overrides += [f"dataset.root={args.root}"] if args.root else []
    checkouts = {"": OWN} | ({str(args.against): args.against.resolve()} if args.against else {})
    measured: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as byte_code:
        environment = _environment(Path(byte_code))
        for checkout in checkouts.values():
            # Leaves its byte code behind.
            with tempfile.TemporaryDirectory() as cache:
                _measure(overrides, Path(cache), checkout, environment)
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    for number, (name, checkout) in enumerate(checkouts.items()):
                        cache = Path(folder) / str(number)
                        cache.mkdir(exist_ok=True)
                        run = _measure(overrides, cache, checkout, environment)
                        measured.setdefault((state, name), []).append(run)
    said = f"--recipe {args.recipe} --rounds {args.rounds} {shlex.join(args.overrides)}".rstrip()
    publish(_report(said, measured), args.save)


def _measure(
    overrides: Sequence[str], cache: Path, checkout: Path, environment: Mapping[str, str]
) -> dict[str, float]:
    """Seconds of every part of one run, in a process of its own."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        where = [f"cache.root={cache}", f"hydra.run.dir={run_dir}"]
        command = [sys.executable, "-m", "pipeline", *overrides, *where]
        env = {**environment, "PYTHONPATH": str(checkout)}
        before, begun = _processor_s(), time.perf_counter()
        done = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
        seconds, processor_s = time.perf_counter() - begun, _processor_s() - before
        if done.returncode:
            raise SystemExit(done.stderr)
        times = json.loads((run_dir / "summary.json").read_text())["time"]
    parts = {name: times[key] for name, key in START_UP.items()}
    other = times["first_step_s"] - sum(parts.values())
    whole = {FIRST_STEP: times["first_step_s"], WHOLE: seconds, PROCESSOR: processor_s}
    return {**parts, "other": other, **whole}


def _processor_s() -> float:
    """Seconds of processor time of all processes that were started and have ended."""
    used = resource.getrusage(resource.RUSAGE_CHILDREN)
    return used.ru_utime + used.ru_stime


def _environment(byte_code: Path) -> Mapping[str, str]:
    """This one, with a folder for byte code, whatever is set here."""
    kept = {key: value for key, value in os.environ.items() if key != "PYTHONDONTWRITEBYTECODE"}
    return {**kept, "PYTHONPYCACHEPREFIX": str(byte_code)}


def _report(what: str, measured: Measured) -> str:
    (first, *_), *_ = measured.values()
    rows = [
        [
            f"{state}, {name}" if name else state,
            *(f"{statistics.median(run[part] for run in runs):.2f}" for part in first),
        ]
        for (state, name), runs in measured.items()
    ]
    return "\n".join(
        (
            heading("Start-up", f"python -m benchmarks.startup {what}", PACKAGES),
            f"Seconds, medians of {len(next(iter(measured.values())))} processes; load average "
            f"{os.getloadavg()[0]:.1f}.\n",
            table(("cache", *first), rows),
        )
    )


if __name__ == "__main__":
    main()
