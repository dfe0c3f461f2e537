"""What shards computed at once cost and need: one recipe with 1, 2, 4 and 8 of them, in turn.

    python -m benchmarks.memory --recipe lenet5_mnist --root DIR

Prints, per number, the median of milliseconds a step, its ratio to the best one, and the
temporaries of a step. `auto` is the number that `train.memory=auto` begins with.
"""

from __future__ import annotations

import argparse
import shlex
import statistics

from benchmarks.layouts import PACKAGES, Contestant
from benchmarks.measure import add_save, alternate, heading, publish, table


def main() -> None:
    """Measure and print a Markdown table. The losses of all numbers must be the same bits."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--recipe", default="lenet5_digits")
    parser.add_argument("--steps", type=int, default=20, help="steps of a round")
    parser.add_argument("--rounds", type=int, default=10)
    parser.add_argument("--at-once", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--root", help="dataset.root")
    add_save(parser, "memory.md")
    parser.add_argument("overrides", nargs="*", help="of the recipe, as train.batch_size=512")
    args = parser.parse_args()
    total = args.steps * (args.rounds + 1)
    overrides = ["train.epochs=null", "train.epochs=null", f"train.steps={total}"]
    overrides += ["train.memory=auto", *args.overrides]
    overrides += [f"dataset.root={args.root}"] if args.root else []
    contestants = {
        "auto" if count is None else str(count): Contestant(
            args.recipe, overrides, args.steps, count
        )
        for count in (*args.at_once, None)
    }
    times = alternate(contestants, args.rounds)
    medians = {name: statistics.median(rounds) for name, rounds in times.items()}
    rows = [
        [
            f"auto: {contestants[name].at_once}" if name == "auto" else name,
            f"{median:.3f}",
            f"{median / min(medians.values()):.2f}",
            f"{contestants[name].temporary_bytes / 1e6:,.1f}",
        ]
        for name, median in medians.items()
    ]
    same = len({contestant.losses for contestant in contestants.values()}) == 1
    counts = " ".join(map(str, args.at_once))
    what = f"--recipe {args.recipe} --steps {args.steps} --rounds {args.rounds} --at-once {counts}"
    what += f" -- {shlex.join(args.overrides)}" if args.overrides else ""
    header = ("shards at once", "ms/step, median", "against the best", "temporaries, MB")
    title = heading("Memory", f"python -m benchmarks.memory {what}", PACKAGES)
    bits = "the same bits" if same else "DIFFERENT BITS"
    text = f"{args.rounds} rounds of {args.steps} steps; losses of all: {bits}."
    publish(f"{title}\n{text}\n\n{table(header, rows)}", args.save)


if __name__ == "__main__":
    main()
