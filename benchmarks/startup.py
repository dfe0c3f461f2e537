"""Start-up: seconds from the command to the first step, cold and warm, and their parts.

    python -m benchmarks.startup --recipe lenet5_digits --rounds 5
    python -m benchmarks.startup --against ../another/checkout

Every run is a new process. A cold run starts with an empty cache folder, a warm run with the folder
of a cold one. Downloads don't count: use `--root` for a recipe that needs them. Python has its byte
code, as in every start but the first after an installation. With `--against` the commands of
another checkout have their turn after each of these, on the same machine.
Prints a Markdown table of medians, with the parts of `time` in `summary.json`. The remaining part
is the interpreter's start and end and the time between the parts.
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
CHECKOUT = Path(__file__).parents[1]
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
    checkouts = {"": CHECKOUT} | (
        {str(args.against): args.against.resolve()} if args.against else {}
    )
    measured: dict[tuple[str, str], list[dict[str, float]]] = {}
    with tempfile.TemporaryDirectory() as byte_code:
        environment = _make_environment(Path(byte_code))
        for checkout in checkouts.values():
            # This run writes the byte code.
            with tempfile.TemporaryDirectory() as unused_cache:
                _measure(overrides, Path(unused_cache), checkout, environment)
        for _ in range(args.rounds):
            with tempfile.TemporaryDirectory() as folder:
                for state in ("cold", "warm"):
                    for number, (name, checkout) in enumerate(checkouts.items()):
                        cache = Path(folder) / str(number)
                        cache.mkdir(exist_ok=True)
                        run = _measure(overrides, cache, checkout, environment)
                        measured.setdefault((state, name), []).append(run)
    options = f"--recipe {args.recipe} --rounds {args.rounds} {shlex.join(args.overrides)}".rstrip()
    publish(_report(options, measured), args.save)


def _measure(
    overrides: Sequence[str], cache: Path, checkout: Path, environment: Mapping[str, str]
) -> dict[str, float]:
    """Return the seconds of every part of a run in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        run_dir = Path(folder) / "run"
        folders = [f"cache.root={cache}", f"hydra.run.dir={run_dir}"]
        command = [sys.executable, "-m", "pipeline", *overrides, *folders]
        env = {**environment, "PYTHONPATH": str(checkout)}
        processor_before_s = _read_processor_s()
        started_at = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, env=env, cwd=folder)
        seconds = time.perf_counter() - started_at
        processor_s = _read_processor_s() - processor_before_s
        if process.returncode:
            raise SystemExit(process.stderr)
        times = json.loads((run_dir / "summary.json").read_text())["time"]
    # An older checkout may lack a part, whose time is then in `other`.
    parts = {name: times.get(key, 0.0) for name, key in START_UP.items()}
    parts["other"] = times["first_step_s"] - sum(parts.values())
    parts |= {"first step": times["first_step_s"], "whole command": seconds}
    return {**parts, "of the processor": processor_s}


def _read_processor_s() -> float:
    """Return the processor seconds of all ended child processes."""
    usage = resource.getrusage(resource.RUSAGE_CHILDREN)
    return usage.ru_utime + usage.ru_stime


def _make_environment(byte_code: Path) -> Mapping[str, str]:
    """Return this environment with a folder for byte code, which Python then always writes."""
    return {**os.environ, "PYTHONPYCACHEPREFIX": str(byte_code), "PYTHONDONTWRITEBYTECODE": ""}


def _report(options: str, measured: Measured) -> str:
    (first, *_), *_ = measured.values()
    rows = [
        [
            f"{state}, {name}" if name else state,
            *(f"{statistics.median(run[part] for run in runs):.2f}" for part in first),
        ]
        for (state, name), runs in measured.items()
    ]
    head = heading("Start-up", f"python -m benchmarks.startup {options}", PACKAGES)
    count = len(next(iter(measured.values())))
    load = f"load average {os.getloadavg()[0]:.1f}."
    result = table(("cache", *first), rows)
    return f"{head}\nSeconds, medians of {count} processes; {load}\n\n{result}"


if __name__ == "__main__":
    main()
