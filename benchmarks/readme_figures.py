"""Every figure of README: the command that measures it, its age, and whether its code changed.

    python -m benchmarks.readme_figures           # prints the table with ages
    python -m benchmarks.readme_figures --save    # writes benchmarks/README.md, without ages

The age of a figure is the date in its result, or else the date of the commit that wrote it into
README. A figure is *younger than its code* if no commit has changed the files that it measures
since; a day counts as a whole, so a figure of the day of a change isn't younger. The exit status is
1 if ages can't be known: outside of a git checkout, and in a shallow one.
"""

from __future__ import annotations

import argparse
import datetime
import re
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from benchmarks.measure import RESULTS, publish, table

ROOT = Path(__file__).parent.parent
README = ROOT / "README.md"
LIST = ROOT / "benchmarks" / "README.md"
DATE = re.compile(r"^(\d{4}-\d\d-\d\d);", re.MULTILINE)
"""Date of a result, as `measure.heading` writes it."""
NUMBER = r"\d+(?:[.,]\d+)*"
MEASURED = re.compile(
    rf"(?:{NUMBER} to )?{NUMBER} ?(?:x|%|s|ms|us|MB|GB|minutes|hours)(?![\w-])"
    rf"|(?:accurac\w+|loss|top5|tau|outside)(?: of| is| an earlier model missed by)? {NUMBER}"
    rf"(?: to {NUMBER})?"
)
"""A measured figure: a number with a unit, or after the name of a metric."""

STEP = (
    *("pipeline/backends/xla.py", "pipeline/backends/step_loops.py", "pipeline/engine/loop.py"),
    *("pipeline/models/layers", "pipeline/models/lowerings", "pipeline/models/modules"),
    *("pipeline/training/forward_pass.py", "pipeline/training/step.py"),
    *("pipeline/training/update.py", "benchmarks/ours.py", "benchmarks/tasks.py"),
)
"""What a training step's time depends on."""
ASCEND = ("pipeline/backends/ascend",)


@dataclass(frozen=True)
class ReadmeFigure:
    """Figures of README that one command measures."""

    excerpts: tuple[str, ...]
    """Parts of lines of README, each of which is there once."""
    command: str
    code: tuple[str, ...]
    """Files and folders whose change makes the figures old."""
    result: str = ""
    """File in `benchmarks/results` with a date; "" if README alone has the figures."""


@dataclass(frozen=True)
class FigureAge:
    """Dates as 2026-01-31, and commits that changed the code after the figure's date."""

    measured: str
    changed: str
    commits: int

    @property
    def verdict(self) -> str:
        if self.measured > self.changed:
            return "younger than its code"
        return f"not younger than its code, changed {self.changed} ({self.commits} later commits)"


def _time_step(excerpt: str, task: str, peers: str, rounds: int) -> ReadmeFigure:
    """Return the row of a task in the table of step times."""
    command = f"python -m benchmarks.train --task {task} --peers {peers} --rounds {rounds} --save"
    return ReadmeFigure((excerpt,), command, STEP, f"train_{task}_float32.md")


ALL_PEERS = "torch,torch_compile,keras,mindspore,jax_loop"
TORCH = "torch,torch_compile"
UNTRAINED = "'stages=[data,build,compile]'"
FIGURES = (
    ReadmeFigure(
        (
            "lenet5: 61,684 parameters, 0.2 MB",
            "about 1.36 ms a step, 3.1 s in all",
            "loss 0.0042467415, 1.36 ms a step",
            "accuracy 0.9889, top5 1.0000, loss 0.0254 over 359 samples",
            "It takes 8 to 15 s on two CPU cores, and 5 to 11 s once its programs are cached.",
            "accuracies of 0.986 to 0.994 were seen",
        ),
        "python -m pipeline",
        (
            *STEP,
            "recipes/lenet5_digits.yaml",
            "pipeline/stages/run.py",
            "pipeline/stages/compile.py",
        ),
    ),
    ReadmeFigure(
        ("pytest -n 2    # 2 minutes",),
        "time pytest -n 2",
        ("tests", "pyproject.toml"),
    ),
    _time_step(
        "| LeNet-5, MNIST, batch 32 | 0.75 ms | 2.0x | 3.5x | 4.2x | 3.8x |",
        "lenet5",
        ALL_PEERS,
        10,
    ),
    _time_step(
        "| MLP 784-512-512-10, batch 64 | 0.88 ms | 1.8x | 2.0x | 1.1x | 1.2x |",
        "mlp",
        ALL_PEERS,
        10,
    ),
    _time_step(
        "| ResNet-18, CIFAR-10, batch 128 | 0.93 s | 1.6x | 1.4x | | |", "resnet18", TORCH, 10
    ),
    _time_step("| ViT, 6 blocks of 192, batch 64 | 278 ms | 1.9x | 1.8x | | |", "vit", TORCH, 5),
    _time_step("| GPT, 4 blocks of 256, batch 16 | 151 ms | 1.9x | 1.9x | | |", "gpt", TORCH, 5),
    ReadmeFigure(
        ("chip predicts the step time of each launch mode, with an interval, in about 10 s",),
        f"python -m pipeline +recipe=resnet50_cifar10 device=ascend910 {UNTRAINED}",
        (*ASCEND, "pipeline/stages/estimate.py"),
    ),
    ReadmeFigure(
        (
            "Against 41 published steps the median error is 10 %",
            "it is 29 % (mean 35 %), tau is 0.48, and 57 % are inside their 80 % interval",
            "On 26 steps from outside an earlier model missed by 42 %",
        ),
        "python -m pipeline.backends.ascend.validate",
        ASCEND,
    ),
)


def find_figures(text: str) -> list[str]:
    """Return the measured figures of a text outside of its commands."""
    commands = re.compile(r"^    (?:python -m|pip |tensorboard ).*?(?=    #|$)", re.MULTILINE)
    return MEASURED.findall(commands.sub("", text))


def find_unlisted(text: str, figures: Sequence[ReadmeFigure] = FIGURES) -> list[str]:
    """Return the measured figures of a text that no row has."""
    for excerpt in sorted(
        (e for figure in figures for e in figure.excerpts), key=len, reverse=True
    ):
        text = text.replace(excerpt, "")
    return find_figures(text)


def _run_git(*arguments: str, root: Path) -> str:
    """Return git's output. Raises SystemExit with git's message if it fails or is missing."""
    try:
        process = subprocess.run(
            ["git", *arguments], cwd=root, capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        reason = getattr(error, "stderr", "") or str(error)
        raise SystemExit(f"ages need git and its history: {reason.strip()}") from error
    return process.stdout.strip()


def _read_dates(root: Path, result: str) -> list[str]:
    text = (root / RESULTS.relative_to(ROOT) / result).read_text(encoding="utf-8")
    return DATE.findall(text)


def read_age(figure: ReadmeFigure, root: Path = ROOT) -> FigureAge:
    """Return the dates of a figure and of its code. Raises SystemExit without git's history."""
    if _run_git("rev-parse", "--is-shallow-repository", root=root) == "true":
        raise SystemExit("ages need git's history: this checkout is shallow")
    if figure.result:
        dates = _read_dates(root, figure.result)
    else:
        log = ("log", "-1", "--format=%as")
        dates = [
            _run_git(*log, f"-S{excerpt}", "--", README.name, root=root)
            for excerpt in figure.excerpts
        ]
    # A figure that isn't committed yet is of today.
    measured = min(date or datetime.date.today().isoformat() for date in dates)
    changes = _run_git("log", "--format=%as", "--no-merges", "--", *figure.code, root=root)
    days = changes.splitlines()
    return FigureAge(measured, days[0] if days else "", sum(day > measured for day in days))


def format_list(figures: Sequence[ReadmeFigure] = FIGURES) -> str:
    """Return benchmarks/README.md: the rows without their ages, which change with every commit."""
    rows = []
    for figure in figures:
        result = "README alone"
        if figure.result:
            date = _read_dates(ROOT, figure.result)[0]
            result = f"[{figure.result}](results/{figure.result}), {date}"
        lines = (excerpt.strip("| ").replace(" | ", ", ") for excerpt in figure.excerpts)
        rows.append(["<br>".join(lines), f"`{figure.command}`", result])
    return (
        "# Benchmarks\n\nEvery figure of [README](../README.md), the command that measures it, and "
        "the file with its\nmachine, versions and date. `python -m benchmarks.readme_figures` adds "
        "when each was measured and\nwhether its code has changed since; it wrote this file with "
        "`--save`. Other benchmarks are listed\nin [docs/performance.md](../docs/performance.md); "
        "each says in its first lines what it measures.\n\n"
        + table(["figure", "command", "result"], rows)
    )


def format_ages(figures: Sequence[ReadmeFigure] = FIGURES) -> str:
    """Return a Markdown table of the figures with their ages."""
    rows = []
    for figure in figures:
        age = read_age(figure)
        first = figure.excerpts[0].strip("| ").replace(" | ", ", ")
        more = f" and {len(figure.excerpts) - 1} more" if len(figure.excerpts) > 1 else ""
        rows.append([first + more, age.measured, age.verdict, f"`{figure.command}`"])
    return table(["figure", "measured", "age", "command"], rows)


def main() -> int:
    """Print the table; return 1 if README has a figure without a row."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--save", action="store_true", help="write benchmarks/README.md")
    args = parser.parse_args()
    unlisted = find_unlisted(README.read_text(encoding="utf-8"))
    for figure in unlisted:
        print(f"README.md has {figure}, which no row of FIGURES has", file=sys.stderr)
    publish(format_list() if args.save else format_ages(), LIST if args.save else None)
    return 1 if unlisted else 0


if __name__ == "__main__":
    sys.exit(main())
