"""What sinking buys: one recipe at several sink sizes, in turn, in one process.

    python -m benchmarks.sink --recipe mlp_mnist --steps 2000 --root DIR
    python -m benchmarks.sink model=mlp 'model.hidden=[16]' train.batch_size=16

Prints, per sink size, the median over the rounds of milliseconds a step: of the whole training
stage, everything that the host does included, and of the dispatches alone.
"""

from __future__ import annotations

import argparse
import platform
import statistics
import tempfile
from pathlib import Path

from pipeline import load_recipe, run

SINKS = ("off", "1", "10", "100", "1000")


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", help="dataset.root")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.batch_size=16")
    args = parser.parse_args()
    overrides = [f"train.steps={args.steps}", "eval.every_passes=null", "monitor.loss_every=0"]
    overrides += args.overrides
    overrides += [f"dataset.root={args.root}"] if args.root else []
    measured: dict[str, list[tuple[float, float]]] = {sink: [] for sink in SINKS}
    for _ in range(args.rounds):
        for sink, times in measured.items():
            times.append(_measure(args.recipe, overrides, sink, args.steps))
    _print_table(" ".join([args.recipe, *args.overrides]), args.steps, measured)


def _measure(recipe: str, overrides: list[str], sink: str, steps: int) -> tuple[float, float]:
    """Milliseconds a step of the training stage and of its dispatches."""
    how = ["train.sink=false"] if sink == "off" else [f"train.sink_size={sink}"]
    with tempfile.TemporaryDirectory() as folder:
        times = run(load_recipe(recipe, [*overrides, *how]), Path(folder)).time
    return 1000 * (times["train_s"] or 0) / steps, times["step_ms"] or 0


def _print_table(what: str, steps: int, measured: dict[str, list[tuple[float, float]]]) -> None:
    rounds = len(measured["off"])
    medians = {
        sink: [statistics.median(column) for column in zip(*times, strict=True)]
        for sink, times in measured.items()
    }
    print(f"\n{what}, {steps} steps, median of {rounds} rounds, {platform.machine()}\n")
    print("| sink | training stage, ms/step | against off | dispatches alone, ms/step |")
    print("| --- | --- | --- | --- |")
    for sink, (stage_ms, dispatch_ms) in medians.items():
        ratio = medians["off"][0] / stage_ms
        print(f"| {sink} | {stage_ms:.3f} | {ratio:.2f}x | {dispatch_ms:.3f} |")


if __name__ == "__main__":
    main()
