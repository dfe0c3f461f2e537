"""Does training wait for streamed data? The wait a step as a share of the step, as runs report it.

    python -m benchmarks.streamed_batches
    python -m benchmarks.streamed_batches --root DIR lenet5_mnist "mlp_mnist train.batch_size=16"

A contestant is a recipe and its overrides, in one argument. Its data are streamed, however few: a
window of up to 1,024 batches is read while training runs on the window before. The figures come
from `feed` and `time` in summary.json: the median step, the time of the reading threads to prepare
a batch, and the time that training waited for a window, spread over the steps before it. The first
window, which can't be prepared in time, doesn't count. Prints a Markdown table of medians.
"""

from __future__ import annotations

import argparse
import shlex
import statistics
import sys
import tempfile
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path

from benchmarks.measure import add_save, alternate, heading, publish, table
from pipeline import load_recipe, run
from pipeline.core.errors import PipelineError
from pipeline.stages.record.summary import Summary

PACKAGES = ("jax", "jaxlib", "grain", "numpy")
CONTESTANTS = (
    "lenet5_digits model=mlp model.hidden=[16] train.steps=8192",
    "lenet5_digits train.batch_size=8",
    "lenet5_digits",
    "lenet5_digits train.batch_size=64 train.steps=2048",
)
"""From a fifth of a millisecond of compute a step to a few."""


@dataclass(frozen=True)
class LoaderCost:
    """Costs of the loader of one run, and the time of its steps."""

    step_ms: float
    prepare_ms: float
    """Of a batch, the sum over all reading threads."""
    wait_ms: float
    """Of a step, on the training thread."""
    ready: float
    """The mean share of a window that was read when training requested it."""

    @property
    def wait_share(self) -> float:
        """The wait as a share of the step."""
        return self.wait_ms / self.step_ms


def main() -> int:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("contestants", nargs="*", default=CONTESTANTS)
    parser.add_argument("--steps", type=int, default=3072, help="of a run that names no other")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--root", help="dataset.root")
    add_save(parser, "streamed_batches.md")
    args = parser.parse_args()
    common = [f"train.steps={args.steps}", "train.sink_size=1000", "monitor.loss_every=0"]
    common += ["stages=[data,build,compile,train]"]
    common += ["eval.every_epochs=null", "checkpoint.every_epochs=null"]
    common += [f"dataset.root={args.root}"] if args.root else []
    turns = {name: partial(measure, name, common) for name in args.contestants}
    try:
        measured = alternate(turns, args.rounds)
    except PipelineError as error:
        print(f"benchmarks.streamed_batches: {error}", file=sys.stderr)
        return 1
    named = [] if args.contestants is CONTESTANTS else args.contestants
    options = shlex.join(["--steps", str(args.steps), "--rounds", str(args.rounds), *named])
    publish(report(options, measured), args.save)
    return 0


def measure(contestant: str, common: Sequence[str]) -> LoaderCost:
    """Train once. Raises PipelineError if that fails."""
    recipe, *overrides = contestant.split()
    with tempfile.TemporaryDirectory() as folder:
        summary = run(load_recipe(recipe, [*common, *overrides, "train.feed=stream"]), Path(folder))
    return read_cost(contestant, summary)


def read_cost(contestant: str, summary: Summary) -> LoaderCost:
    """Return the loader's costs in a run. Ends the process if the run is too short to measure."""
    figures = summary.feed
    step_ms = summary.time["median_step_ms"]
    if figures["wait_ms_per_step"] is None or step_ms is None:
        raise SystemExit(
            f"benchmarks.streamed_batches: {contestant}: {summary.steps} steps fit into one "
            "window; more are needed, as by train.steps=3072"
        )
    prepare_ms = sum(figures["prepare_ms_per_step"].values())
    return LoaderCost(step_ms, prepare_ms, figures["wait_ms_per_step"], figures["queue_depth"])


def report(options: str, measured: Mapping[str, Sequence[LoaderCost]]) -> str:
    """Return Markdown: the table, the machine and the versions."""
    rows = []
    for name, runs in measured.items():
        shares = [cost.wait_share for cost in runs]
        row = (
            name,
            f"{statistics.median(cost.step_ms for cost in runs):.3f}",
            f"{statistics.median(cost.prepare_ms for cost in runs):.4f}",
            f"{statistics.median(1000 * cost.wait_ms for cost in runs):.2f}",
            f"{statistics.median(shares):.3%}",
            f"{min(shares):.3%} to {max(shares):.3%}",
            f"{statistics.median(cost.ready for cost in runs):.0%}",
        )
        rows.append(row)
    header = (
        *("recipe", "step, ms", "preparing a batch, ms", "wait a step, us"),
        *("share of the step", "min to max", "ready when asked for"),
    )
    count = len(next(iter(measured.values())))
    command = f"python -m benchmarks.streamed_batches {options}"
    head = heading("Streamed batches", command, PACKAGES)
    return f"{head}\nMedians of {count} rounds, alternating.\n\n{table(header, rows)}"


if __name__ == "__main__":
    sys.exit(main())
