"""When runs with a deadline end: many recipes, one after the other, alone or beside other work.

    python -m benchmarks.deadlines --mnist DIR --cifar DIR
    python -m benchmarks.deadlines --mnist DIR --cifar DIR --busy 2

Prints, per recipe, the end of the process against its deadline, the number of steps that was chosen
before the first step, and the number of trained steps. Recipes without their data are left out.
"""

from __future__ import annotations

import argparse
import json
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import yaml

from benchmarks.layouts import PACKAGES
from benchmarks.measure import add_save, heading, publish, table

CONSTANT = ("schedule=constant",)
RUNS = (
    ("bert_docstrings", None, ()),
    ("bert_docstrings", None, CONSTANT),
    ("breast_cancer_mlp", None, ()),
    ("breast_cancer_mlp", None, CONSTANT),
    ("diabetes_mlp", None, ()),
    ("diabetes_mlp", None, CONSTANT),
    ("gpt_text", None, ()),
    ("gpt_text", None, CONSTANT),
    ("lenet5_digits", None, ()),
    ("lenet5_digits", None, ("schedule=exponential",)),
    ("lenet5_digits", None, ("train.sink_size=10",)),
    ("lenet5_digits", None, ("optimizer=adam", "schedule=polynomial")),
    ("lenet5_digits", "cifar", ("dataset=cifar10",)),
    ("gan_mnist", "mnist", ()),
    ("lenet5_mnist", "mnist", ()),
    ("lenet5_mnist", "mnist", ("schedule=cosine",)),
    ("lenet5_mnist_robust", "mnist", ()),
    ("lenet5_mnist_thor", "mnist", ()),
    ("mlp_mnist", "mnist", ()),
    ("mlp_mnist", "mnist", CONSTANT),
)
"""Recipe, its data (None: shipped with a library), further overrides."""


@dataclass(frozen=True)
class Outcome:
    """What a run did by its deadline."""

    late_s: float
    """Seconds of the process's end after the deadline; below 0 if it ended early."""
    first_steps: str
    """Number of steps that was chosen before the first one."""
    steps: str
    """Number of trained steps, or what the run printed if it failed."""


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--minutes", type=float, default=1.0)
    parser.add_argument("--mnist", help="dataset.root of MNIST")
    parser.add_argument("--cifar", help="dataset.root of CIFAR-10")
    parser.add_argument("--busy", type=int, default=0, help="other processes that compute")
    parser.add_argument("--only", help="regular expression of recipes with overrides")
    add_save(parser, "deadlines.md")
    args = parser.parse_args()
    roots = {"mnist": args.mnist, "cifar": args.cifar}
    rows = []
    for recipe, data, overrides in RUNS:
        name = " ".join((recipe, *overrides))
        if (data and roots[data] is None) or not re.search(args.only or "", name):
            continue
        words = [f"+recipe={recipe}", f"train.minutes={args.minutes}", *overrides]
        words += [f"dataset.root={roots[data]}"] if data else []
        with other_work(args.busy):
            outcome = run_until_deadline(words, 60 * args.minutes)
        share = f"{outcome.late_s / (0.6 * args.minutes):+.1f} %"
        rows.append([name, outcome.first_steps, outcome.steps, share])
        print(" | ".join(rows[-1]), file=sys.stderr)
    options = f" --minutes {args.minutes}" if args.minutes != 1 else ""
    options += f" --busy {args.busy}" if args.busy else ""
    title = heading("Deadlines", f"python -m benchmarks.deadlines{options}", PACKAGES)
    header = ("recipe", "steps chosen first", "steps trained", "end")
    publish(f"{title}\n{table(header, rows)}", args.save)


def run_until_deadline(overrides: list[str], budget_s: float) -> Outcome:
    """Run a recipe with a deadline of `budget_s` seconds in a new process."""
    with tempfile.TemporaryDirectory() as folder:
        command = [sys.executable, "-m", "pipeline", *overrides, f"hydra.run.dir={folder}/run"]
        started_at = time.perf_counter()
        process = subprocess.run(command, capture_output=True, text=True, check=False)
        late_s = time.perf_counter() - started_at - budget_s
        plan_line = re.search(r"^deadline +([\d,]+) steps", process.stdout, re.MULTILINE)
        first_steps = plan_line[1] if plan_line else ""
        if process.returncode:
            return Outcome(late_s, first_steps, process.stderr.strip().splitlines()[-1])
        run_dir = Path(folder, "run")
        recipe = yaml.safe_load((run_dir / "recipe.yaml").read_text(encoding="utf-8"))
        summary = json.loads((run_dir / "summary.json").read_text(encoding="utf-8"))
        train = recipe["train"]
        is_cut = summary.get("reason") is not None
        steps = train["end_step"] if train["end_step"] is not None else train["steps"]
        return Outcome(late_s, first_steps, f"{steps:,}{', cut' if is_cut else ''}")


@contextmanager
def other_work(processes: int) -> Iterator[None]:
    """Let processes compute without end meanwhile."""
    burner = [sys.executable, "-c", "while True: sum(range(10_000))"]
    running = [subprocess.Popen(burner) for _ in range(processes)]
    try:
        yield
    finally:
        for process in running:
            process.kill()
            process.wait()


if __name__ == "__main__":
    main()
