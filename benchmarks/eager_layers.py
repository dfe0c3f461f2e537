"""What compiling single layers in eager mode buys: the time of a step, with patterns and without.

    python -m benchmarks.eager_layers --recipe lenet5_digits --layers 'conv_*,dense_*'

Runs go on from one step to the next in turns, so that other work on the machine hits all of them
alike. The first steps, which compile, are not counted. Graph mode without sinks is there to compare
with. Prints a Markdown table of medians; ratios are of the steps of a round.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import statistics
import time
from collections.abc import Callable

from benchmarks.measure import add_save, alternate, heading, publish, table
from pipeline import load_recipe
from pipeline.core.reporter import Reporter
from pipeline.stages.build import build
from pipeline.stages.compile import compile_programs
from pipeline.stages.data import load_data

PACKAGES = ("jax", "jaxlib", "flax")
WARM_UP = 3
EAGER = "eager"
GRAPH = "graph, no sinks"


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--layers", default="conv_*,dense_*", help="patterns, with commas")
    parser.add_argument("--steps", type=int, default=5, help="in a round")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("overrides", nargs="*", help="of the recipe")
    add_save(parser, "eager_layers.md")
    args = parser.parse_args()
    total = WARM_UP + args.steps * args.rounds
    base = ["train.epochs=null", f"train.steps={total}", "train.sink=false", *args.overrides]
    compiled = f"eager, {args.layers.replace(',', ' and ')} compiled"
    modes = {
        EAGER: ["train.mode=eager"],
        compiled: ["train.mode=eager", f"train.jit_layers=[{args.layers}]"],
        GRAPH: ["train.mode=graph"],
    }
    turns = {name: _steps(args.recipe, [*base, *mode], args.steps) for name, mode in modes.items()}
    command = f"python -m benchmarks.eager_layers --recipe {args.recipe} --layers '{args.layers}'"
    title = f"Single layers compiled in eager mode, {args.recipe}"
    publish(
        heading(title, " ".join([command, *args.overrides]), PACKAGES)
        + report(alternate(turns, args.rounds)),
        args.save,
    )


def _steps(recipe: str, overrides: list[str], steps: int) -> Callable[[], float]:
    """Open a run, and return a function of the next steps that returns their median seconds."""
    loaded = load_recipe(recipe, overrides)
    reporter = Reporter()
    with contextlib.redirect_stdout(io.StringIO()):
        backend = loaded.device.open(loaded.parallel)
        dataset = load_data(loaded, reporter)
        built = build(loaded, dataset, reporter)
        executable = compile_programs(loaded, dataset, built, backend, reporter)
    state = executable.init()
    done = 0

    def advance(count: int = steps) -> float:
        nonlocal state, done
        times = []
        for _ in range(count):
            started_at = time.perf_counter()
            state, _ = executable.run(state, done, done + 1, "none")
            times.append(time.perf_counter() - started_at)
            done += 1
        return statistics.median(times)

    advance(WARM_UP)
    return advance


def report(seconds_by_mode: dict[str, list[float]]) -> str:
    """Return the table of a step's milliseconds, and of the ratios to eager mode."""
    rounds = len(seconds_by_mode[EAGER])
    rows = []
    for name, seconds in seconds_by_mode.items():
        ratios = [
            eager_s / mode_s
            for eager_s, mode_s in zip(seconds_by_mode[EAGER], seconds, strict=True)
        ]
        rows.append(
            [
                name,
                f"{1e3 * statistics.median(seconds):.1f}",
                f"{1e3 * min(seconds):.1f} to {1e3 * max(seconds):.1f}",
                f"{statistics.median(ratios):.2f}x",
                f"{min(ratios):.2f} to {max(ratios):.2f}",
            ]
        )
    header = ["mode", "ms/step", "min to max", "as fast as eager", "min to max"]
    return f"\nMedians of {rounds} rounds, alternating.\n\n" + table(header, rows)


if __name__ == "__main__":
    main()
