"""How many epochs, and how much time, recipes need to reach an accuracy.

    python -m benchmarks.epochs_to_accuracy --accuracy 0.985 --root DIR \\
        lenet5_mnist lenet5_mnist_thor

A contestant is a recipe, with overrides behind it in the same word: "lenet5_mnist seed=2". Prints,
for each, the medians over the seeds of the epochs and of the seconds of training that went by when
an evaluation first showed the accuracy; compiling and evaluating are not counted.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import machine, versions
from pipeline import load_recipe, run
from pipeline.core.errors import RunError


@dataclass(frozen=True)
class Course:
    """One training: when it reached the accuracy, None where it did not, and where it ended.

    One that diverged has no figures.
    """

    epochs: float | None
    train_s: float | None
    step_ms: float
    final: float


def main() -> None:
    """Train and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("contestants", nargs="+")
    parser.add_argument("--accuracy", type=float, default=0.985)
    parser.add_argument("--every-steps", type=int, default=100, help="between two evaluations")
    parser.add_argument("--seeds", default="1,2,3")
    parser.add_argument("--root", help="dataset.root")
    args = parser.parse_args()
    common = [f"eval.every_steps={args.every_steps}", "monitor.loss_every=0"]
    common += ["monitor.tensorboard=false", "checkpoint.every_epochs=null"]
    common += [f"dataset.root={args.root}"] if args.root else []
    rows = {
        contestant: [
            _train(contestant, [*common, f"seed={seed}"], args.accuracy)
            for seed in args.seeds.split(",")
        ]
        for contestant in args.contestants
    }
    _print_table(rows, args.accuracy, args.every_steps)


def _train(contestant: str, overrides: list[str], accuracy: float) -> Course:
    recipe, *recipe_overrides = contestant.split()
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run(load_recipe(recipe, [*overrides, *recipe_overrides]), Path(folder))
        except RunError as error:
            print(f"{contestant}: {error}")
            return Course(None, None, math.nan, math.nan)
        lines = (Path(folder) / "evals.jsonl").read_text().splitlines()
    evals = [json.loads(line) for line in lines]
    step = next((line["step"] for line in evals if line["accuracy"] >= accuracy), None)
    step_ms = summary.time["median_step_ms"] or 0.0
    steps_per_epoch = summary.steps / summary.epochs
    return Course(
        epochs=step / steps_per_epoch if step else None,
        train_s=step * step_ms / 1000 if step else None,
        step_ms=step_ms,
        final=evals[-1]["accuracy"],
    )


def _print_table(rows: dict[str, list[Course]], accuracy: float, every_steps: int) -> None:
    print(f"\n{machine()}; {versions(['jax', 'optax'])}; evaluated every {every_steps} steps\n")
    print(f"| recipe | epochs to {accuracy:.1%} | of each seed | training s | ms/step | final |")
    print("| --- | --- | --- | --- | --- | --- |")
    for name, courses in rows.items():
        epochs = [run_schedule.epochs for run_schedule in courses]
        by_seed = ", ".join("never" if n is None else f"{n:.2f}" for n in epochs)
        reached = [run_schedule for run_schedule in courses if run_schedule.epochs is not None]
        median = _median([run_schedule.epochs or 0 for run_schedule in reached], len(courses))
        seconds = _median([run_schedule.train_s or 0 for run_schedule in reached], len(courses))
        step_ms = _median_of_finite([run_schedule.step_ms for run_schedule in courses])
        final = _median_of_finite([run_schedule.final for run_schedule in courses])
        print(f"| {name} | {median} | {by_seed} | {seconds} | {step_ms:.2f} | {final:.4f} |")


def _median_of_finite(values: list[float]) -> float:
    """Return the median over the runs that didn't diverge; NaN if all did."""
    finite = [value for value in values if math.isfinite(value)]
    return statistics.median(finite) if finite else math.nan


def _median(values: list[float], runs: int) -> str:
    """Return the median over all runs; a run without the accuracy counts as infinite."""
    ordered = sorted(values) + [float("inf")] * (runs - len(values))
    middle = statistics.median(ordered)
    return "never" if middle == float("inf") else f"{middle:.2f}"


if __name__ == "__main__":
    main()
