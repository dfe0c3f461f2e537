"""THOR's gain over tuned Momentum on a ResNet for CIFAR-10: epochs to an accuracy (L-06).

    python -m benchmarks.thor_gain RESULTS --root DIR                       # ResNet-20, 80 %
    python -m benchmarks.thor_gain RESULTS --root DIR --blocks 1 --share 4 --accuracy 0.6
    python -m benchmarks.thor_gain RESULTS --root DIR --minutes 20          # of the processors
    python -m benchmarks.thor_gain RESULTS --table

Both start from `resnet20_cifar10`, crop and flip, batch 128, a cosine to 0 over `--epochs`. Each is
tuned with the first seed by the settings below. The best setting of each needs the fewest steps to
the accuracy, or has the highest accuracy at the end if none reaches it. It is trained with the
other seeds, and the medians over the seeds of both are compared. A training ends once an evaluation
of all 10,000 test images has the accuracy. RESULTS gets a JSON line for each training that ended,
and another call doesn't repeat these, so it may be stopped at any time. `--blocks 1` makes
ResNet-8, `--share 4` trains on a quarter of the images.
"""

from __future__ import annotations

import argparse
import json
import math
import statistics
import tempfile
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

EVALUATIONS_PER_EPOCH = 2
_DECAY = "decay_rate: 0.87, decay_steps: 390"
SETTINGS: Mapping[str, tuple[tuple[str, ...], ...]] = {
    "momentum": tuple((f"train.optimizer.lr={lr}",) for lr in (0.05, 0.1, 0.2)),
    "thor": tuple(
        (
            "optimizer=thor",
            f"train.optimizer.lr={lr}",
            "train.optimizer.momentum=0.9",
            "train.optimizer.weight_decay=5.0e-4",
            "train.optimizer.frequency=100",
            f"train.optimizer.damping={{initial: {damping}, {_DECAY}}}",
        )
        for lr, damping in ((0.02, 0.1), (0.05, 0.1), (0.05, 0.3), (0.1, 0.3))
    ),
}
"""Settings to tune by: learning rates of Momentum, learning rates and damping of THOR.
A large damping goes with a large learning rate, as for LeNet-5 in docs/thor.md."""


def main() -> None:
    """Train what RESULTS doesn't have yet; then, or with --table, print the table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("results", type=Path)
    parser.add_argument("--root", help="dataset.root")
    parser.add_argument("--accuracy", type=float, default=0.8)
    parser.add_argument("--epochs", type=int, default=6)
    parser.add_argument("--blocks", type=int, default=3, help="residual blocks of each stage")
    parser.add_argument("--share", type=int, default=1, help="train on one of N shards")
    parser.add_argument("--seeds", default="1,2,3,4,5")
    parser.add_argument("--minutes", type=float, help="of the processors, after which none begins")
    parser.add_argument("--table", action="store_true")
    args = parser.parse_args()
    seeds = [int(seed) for seed in args.seeds.split(",")]
    if not args.table:
        for setting, seed in _list_open(args, seeds):
            if args.minutes is not None and time.process_time() > 60 * args.minutes:
                break
            line = train(setting, seed, args)
            with args.results.open("a", encoding="utf-8") as file:
                file.write(json.dumps(line) + "\n")
            print(json.dumps(line), flush=True)
    print("\n".join([*table(_read_lines(args)), *compare_medians(_read_lines(args))]))


def _list_open(args: argparse.Namespace, seeds: list[int]) -> Iterator[tuple[tuple[str, ...], int]]:
    """Yield what to train next, in turn: tuning first, then the other seeds of the best."""
    for position in range(max(map(len, SETTINGS.values()))):
        for settings in SETTINGS.values():
            if position < len(settings):
                yield from _skip_done(args, settings[position], seeds[0])
    for name in SETTINGS:
        for seed in seeds[1:]:
            yield from _skip_done(args, find_best(_read_lines(args), name), seed)


def _skip_done(
    args: argparse.Namespace, setting: tuple[str, ...], seed: int
) -> Iterator[tuple[tuple[str, ...], int]]:
    if not any(_has_setting(line, setting) and line["seed"] == seed for line in _read_lines(args)):
        yield setting, seed


def train(setting: tuple[str, ...], seed: int, args: argparse.Namespace) -> dict[str, Any]:
    """Train once, and return when it reached the accuracy and the time."""
    from pipeline import load_recipe, run
    from pipeline.core.errors import RunError

    steps = 50_000 // args.share // 128
    keys = [
        *(f"dataset.root={args.root}", f"seed={seed}", f"train.epochs={args.epochs}"),
        *(f"model.blocks=[{args.blocks},{args.blocks},{args.blocks}]", "monitor.loss_every=0"),
        *("eval.every_epochs=null", f"eval.every_steps={steps // EVALUATIONS_PER_EPOCH}"),
        *("monitor.tensorboard=false", "checkpoint.every_epochs=null", "checkpoint.keep=1"),
        f"train.callbacks=[{{name: stop_at, metric: accuracy, value: {args.accuracy}}}]",
        *([f"dataset.train.num_shards={args.share}"] if args.share > 1 else []),
        *(["dataset.train.shard_id=0"] if args.share > 1 else []),
    ]
    line: dict[str, Any] = {"setting": list(setting), "seed": seed, "accuracy": args.accuracy}
    line |= {"epochs": args.epochs, "blocks": args.blocks, "share": args.share}
    started_at = time.perf_counter()
    processor_before_s = time.process_time()
    with tempfile.TemporaryDirectory() as folder:
        try:
            summary = run(load_recipe("resnet20_cifar10", [*keys, *setting]), Path(folder))
        except RunError as error:
            return {**line, "reached_step": None, "last": math.nan, "ended": str(error)[:200]}
        text = (Path(folder) / "evals.jsonl").read_text(encoding="utf-8")
        evals = [json.loads(entry) for entry in text.splitlines()]
    reached = next((e["step"] for e in evals if e["accuracy"] >= args.accuracy), None)
    return {
        **line,
        "reached_step": reached,
        "steps_per_pass": steps,
        "last": evals[-1]["accuracy"],
        "curve": [[e["step"], e["accuracy"]] for e in evals],
        "median_step_ms": summary.time["median_step_ms"],
        "wall_s": time.perf_counter() - started_at,
        "processor_s": time.process_time() - processor_before_s,
    }


def _read_lines(args: argparse.Namespace) -> list[dict[str, Any]]:
    """Read the trainings of this task, without trainings to another accuracy or on other data."""
    if not args.results.exists():
        return []
    text = args.results.read_text(encoding="utf-8")
    lines = [json.loads(line) for line in text.splitlines() if line]
    keys = ("accuracy", "epochs", "blocks", "share")
    return [line for line in lines if all(line[key] == getattr(args, key) for key in keys)]


def _has_setting(line: Mapping[str, Any], setting: tuple[str, ...]) -> bool:
    return tuple(line["setting"]) == setting


def find_best(lines: list[dict[str, Any]], name: str) -> tuple[str, ...]:
    """Return the setting of an optimizer that reached the accuracy first, or came nearest."""

    def rank(setting: tuple[str, ...]) -> tuple[float, float]:
        match = next((line for line in lines if _has_setting(line, setting)), None)
        if match is None or math.isnan(match["last"]):
            return math.inf, math.inf
        step = match["reached_step"]
        return math.inf if step is None else step, -match["last"]

    return min(SETTINGS[name], key=rank)


def table(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the rows of a Markdown table, a line for each setting."""
    yield "| optimizer | seeds | epochs to the accuracy | accuracy at the end | processor s |"
    yield "| --- | --- | --- | --- | --- |"
    for name, settings in SETTINGS.items():
        for setting in settings:
            trained = [line for line in lines if _has_setting(line, setting)]
            if not trained:
                continue
            keys = ", ".join(
                key.removeprefix("train.optimizer.")
                for key in setting
                if "lr=" in key or "damping" in key
            )
            epochs = ", ".join(
                "never" if line["reached_step"] is None else f"{_count_epochs(line):.2f}"
                for line in trained
            )
            ends = ", ".join(f"{line['last']:.4f}" for line in trained)
            seconds = statistics.median(line.get("processor_s", math.nan) for line in trained)
            seeds = ", ".join(str(line["seed"]) for line in trained)
            yield f"| {name}, {keys} | {seeds} | {epochs} | {ends} | {seconds:.0f} |"


def compare_medians(lines: list[dict[str, Any]]) -> Iterator[str]:
    """Yield the median epochs to the accuracy of the best settings, over the seeds of both."""
    epochs_by_seed = {}
    for name in SETTINGS:
        trained = [line for line in lines if _has_setting(line, find_best(lines, name))]
        epochs_by_seed[name] = {line["seed"]: _count_epochs(line) for line in trained}
    seeds = sorted(set.intersection(*map(set, epochs_by_seed.values())))
    if not seeds:
        return
    yield f"\nMedian epochs to the accuracy over seeds {', '.join(map(str, seeds))}:"
    for name, epochs in epochs_by_seed.items():
        yield f"    {name:<10} {statistics.median(epochs[seed] for seed in seeds):.2f}"


def _count_epochs(line: Mapping[str, Any]) -> float:
    """Return the epochs to the accuracy, infinite if it was never reached."""
    step = line["reached_step"]
    return math.inf if step is None else step / line["steps_per_pass"]


if __name__ == "__main__":
    main()
