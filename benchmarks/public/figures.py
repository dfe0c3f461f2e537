"""Figures of a board: what others published, what runs here reached, and the p-value between them.

The p-value is of the hypothesis that the mean here is at least as good as the published figure
(one-sided, t-distribution). Below 0.05 it is rejected: ours is worse. It is about seeds. Both sides
have the same test samples, whose choice isn't in it.
"""

from __future__ import annotations

import csv
import json
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib import metadata
from pathlib import Path
from statistics import mean, stdev

import numpy as np
from scipy import stats

CACHE = Path("outputs/public")


@dataclass(frozen=True)
class Published:
    """A published accuracy."""

    method: str
    value: float
    source: str
    deviation: float | None = None
    """Population standard deviation over runs; None: not published."""
    runs: int = 1


@dataclass(frozen=True)
class SeedRuns:
    """Runs of one recipe that differ in the seed."""

    accuracies: tuple[float, ...]
    train_s: float
    """Seconds of training of all runs."""

    def describe(self) -> str:
        """Return mean and range, as `0.972 (0.968 to 0.980)`."""
        values = self.accuracies
        if len(values) == 1:
            return f"{values[0]:.3f}"
        return f"{mean(values):.3f} ({min(values):.3f} to {max(values):.3f})"


def compute_p(ours: Sequence[float], published: Published) -> float | None:
    """Return the p-value of the hypothesis that ours is at least as good; None: nothing says how
    much runs differ.

    With a published deviation it is Welch's test. Without one, the published figure counts as one
    run with the deviation of ours, and so does a single run of ours with the published deviation.
    """
    difference = mean(ours) - published.value
    count, others = len(ours), published.runs
    known = published.deviation is not None and others > 1
    if known and published.deviation is not None:
        other = published.deviation**2 * others / (others - 1)
    if count > 1:
        own = stdev(ours) ** 2
        freedom: float = count - 1
        if not known:
            other, others = own, 1
    elif known:
        own, freedom = other, others - 1
    else:
        return None
    squares = own / count, other / others
    if sum(squares) == 0:
        return 1.0 if difference >= 0 else 0.0
    if count > 1 and known:
        freedom = sum(squares) ** 2 / (
            squares[0] ** 2 / (count - 1) + squares[1] ** 2 / (others - 1)
        )
    return float(stats.t.cdf(difference / np.sqrt(sum(squares)), freedom))


def format_p(p: float | None) -> str:
    """Return a p-value with three digits; empty for None."""
    return "" if p is None else f"{p:.3f}"


def describe_published(figure: Published) -> str:
    """Return a published accuracy, with its deviation if that is published."""
    value = f"{figure.value:.3f}"
    return value if figure.deviation is None else f"{value} ± {figure.deviation:.3f}"


def find_other_version(versions: Mapping[str, str]) -> str | None:
    """Return which package is absent or has another version, with the line of pip; None: neither.
    A local part of a version, as in 2.13.0+cpu, doesn't count."""
    for package, version in versions.items():
        try:
            installed = metadata.version(package)
        except metadata.PackageNotFoundError:
            installed = "absent"
        if installed.split("+")[0] != version:
            wanted = " ".join(f"{name}=={number}" for name, number in versions.items())
            return f"{package} is {installed}, not {version}: pip install {wanted}"
    return None


def require_versions(versions: Mapping[str, str]) -> None:
    """Exit with 2 and the line of pip if a package is absent or has another version."""
    problem = find_other_version(versions)
    if problem is not None:
        print(problem, file=sys.stderr)
        raise SystemExit(2)


def train_seeds(words: Sequence[str], seeds: int, folder: Path) -> SeedRuns:
    """Train a recipe with the seeds 1 to `seeds` as one program, as a sweep in a folder, and return
    its runs. What is done already isn't run again. Exits with the sweep's status if it fails."""
    grid = f"seed=range(1,{seeds + 1})" if seeds > 1 else "seed=1"
    keys = [*words, grid, "hydra.sweeper.vectorize=true", f"hydra.sweep.dir={folder}"]
    status = subprocess.run([sys.executable, "-m", "pipeline", "-m", *keys]).returncode
    if status:
        raise SystemExit(status)
    return read_seeds(folder / "sweep.csv")


def read_run(run_dir: Path) -> tuple[float, float]:
    """Return the accuracy of a run, and the seconds of its training."""
    summary = json.loads((run_dir / "summary.json").read_text())
    return float(summary["metrics"]["accuracy"]), float(summary["time"]["train_s"])


def read_seeds(file: Path) -> SeedRuns:
    """Return the runs of a sweep. Raises ValueError for a job that isn't done."""
    with file.open(newline="") as opened:
        jobs = list(csv.DictReader(opened))
    wrong = [job["job"] for job in jobs if job["status"] != "done"]
    if wrong or not jobs:
        raise ValueError(f"{file}: jobs {', '.join(wrong)} aren't done")
    accuracies = tuple(float(job["metrics.accuracy"]) for job in jobs)
    return SeedRuns(accuracies, sum(float(job["train_s"]) for job in jobs))
