"""What several devices and a fixed order of additions cost: one recipe on several layouts, in turn.

    python -m benchmarks.layouts --recipe lenet5_mnist --root DIR train.batch_size=512

Prints, per layout, the median and the range over the rounds of milliseconds a step of a dispatch,
and the ratio of its median to that of one device without `parallel`.
"""

from __future__ import annotations

import argparse
import os
import shlex
import statistics
import time
from dataclasses import replace

import jax
from rich.console import Console

from benchmarks.measure import add_save, alternate, heading, publish, table
from pipeline import load_recipe
from pipeline.backends.base import Executable
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs, get_training_temporaries
from pipeline.stages.data import load_data
from pipeline.stages.fit_memory import count_most_at_once
from pipeline.stages.lower import lower

PACKAGES = ("jax", "jaxlib")
LAYOUTS = {
    "no parallel": (),
    "data, 1 device, layout": ("parallel.mode=data", "parallel.reproducible=layout"),
    "data, 1 device, exact": ("parallel.mode=data",),
    "data, 2 devices, layout": (
        "parallel.mode=data",
        "parallel.devices=2",
        "parallel.reproducible=layout",
    ),
    "data, 2 devices, exact": ("parallel.mode=data", "parallel.devices=2"),
}


class Contestant:
    """A recipe, compiled for a layout and trained round by round. `at_once` is the number of
    shards that are computed at once; None: as many as `train.memory=auto` begins with."""

    def __init__(
        self, recipe_name: str, overrides: list[str], steps: int, at_once: int | None = 1
    ) -> None:
        recipe = load_recipe(recipe_name, overrides)
        self._steps = steps
        with Reporter(console=Console(file=open(os.devnull, "w"))) as reporter:
            backend = recipe.device.open(recipe.parallel)
            dataset = load_data(recipe, reporter)
            built = lower(
                recipe, dataset, build(recipe, dataset, reporter), backend, None, reporter
            )
            self.at_once = at_once or count_most_at_once(built, backend.device.platform)
            built = replace(built, at_once=self.at_once)
            self._executable: Executable = compile_programs(
                recipe, dataset, built, backend, reporter
            )
        self._state = self._executable.init()
        self._done = 0
        self.temporary_bytes = get_training_temporaries(self._executable)
        self()

    def __call__(self) -> float:
        """Train some steps more, and return the milliseconds of one."""
        stop = self._done + self._steps
        started_at = time.perf_counter()
        self._state, telemetry = self._executable.run(self._state, self._done, stop, "loop")
        self.losses = telemetry.loss.tobytes()
        self._done = stop
        return 1000 * (time.perf_counter() - started_at) / self._steps


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--root", help="dataset.root")
    add_save(parser, "layouts.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.batch_size=512")
    args = parser.parse_args()
    # One processor for all: how it is split may not change between layouts.
    jax.config.update("jax_num_cpu_devices", 8)
    total = args.steps * (args.rounds + 1)
    overrides = ["train.epochs=null", "train.epochs=null", f"train.steps={total}"]
    overrides += [*args.overrides, *([f"dataset.root={args.root}"] if args.root else [])]
    contestants = {
        name: Contestant(args.recipe, [*overrides, *keys], args.steps)
        for name, keys in LAYOUTS.items()
    }
    times = alternate(contestants, args.rounds)
    base = statistics.median(times["no parallel"])
    rows = [
        [
            name,
            f"{statistics.median(rounds):.3f}",
            f"{min(rounds):.3f} to {max(rounds):.3f}",
            f"{statistics.median(rounds) / base:.2f}",
        ]
        for name, rounds in times.items()
    ]
    what = f"--recipe {args.recipe} --steps {args.steps} {shlex.join(args.overrides)}".rstrip()
    header = ("layout", "ms/step, median", "range", "against no parallel")
    title = heading("Layouts", f"python -m benchmarks.layouts {what}", PACKAGES)
    publish(
        f"{title}\n{args.rounds} rounds of {args.steps} steps.\n\n{table(header, rows)}", args.save
    )


if __name__ == "__main__":
    main()
