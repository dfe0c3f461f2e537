"""The gain of sinking: one recipe at several sink sizes, in turn, in one process.

    python -m benchmarks.sink --recipe mlp_mnist --steps 2000 --root DIR
    python -m benchmarks.sink model=mlp train.batch_size=16

Prints, per sink size, the median over the rounds of milliseconds a step: of the training stage with
everything that the host does, and of the dispatches alone.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import tempfile
from pathlib import Path

from benchmarks.measure import add_save, heading, publish, table
from pipeline import load_recipe, run

PACKAGES = ("jax", "jaxlib")
SINKS = ("off", "1", "10", "100", "1000")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", help="dataset.root")
    add_save(parser, "sink.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.batch_size=16")
    args = parser.parse_args()
    overrides = [f"train.steps={args.steps}", "eval.every_epochs=null", "monitor.loss_every=0"]
    overrides += args.overrides
    overrides += [f"dataset.root={args.root}"] if args.root else []
    measured: dict[str, list[tuple[float, float]]] = {sink: [] for sink in SINKS}
    for _ in range(args.rounds):
        for sink, times in measured.items():
            times.append(_measure(args.recipe, overrides, sink, args.steps))
    options = f"--recipe {args.recipe} --steps {args.steps} {shlex.join(args.overrides)}".rstrip()
    publish(_report(options, measured), args.save)


def _measure(recipe: str, overrides: list[str], sink: str, steps: int) -> tuple[float, float]:
    """Return milliseconds a step of the training stage and of its dispatches."""
    sink_keys = ["train.sink=false"] if sink == "off" else [f"train.sink_size={sink}"]
    with tempfile.TemporaryDirectory() as folder:
        times = run(load_recipe(recipe, [*overrides, *sink_keys]), Path(folder)).time
    return 1000 * (times["train_s"] or 0) / steps, times["median_step_ms"] or 0


def _report(options: str, measured: dict[str, list[tuple[float, float]]]) -> str:
    medians = {
        sink: [statistics.median(column) for column in zip(*times, strict=True)]
        for sink, times in measured.items()
    }
    stage_off_ms, _ = medians["off"]
    rows = [
        [sink, f"{stage_ms:.3f}", f"{stage_off_ms / stage_ms:.2f}x", f"{dispatch_ms:.3f}"]
        for sink, (stage_ms, dispatch_ms) in medians.items()
    ]
    header = ("sink", "training stage, ms/step", "against off", "dispatches alone, ms/step")
    head = heading("Sinks of several sizes", f"python -m benchmarks.sink {options}", PACKAGES)
    return f"{head}\nMedians of {len(measured['off'])} rounds.\n\n{table(header, rows)}"


if __name__ == "__main__":
    main()
