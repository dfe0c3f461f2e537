"""Accuracy of `fcn_series` on three sets of the UCR archive, beside published ones.

    pip install aeon && python -m benchmarks.series --save

Decided before the first run: the archive's own split, the accuracy after the last epoch, and seeds
1 to 5. A set is one sweep, which a single program computes. Published values are of that split too,
means of five runs: FCN (Wang, Yan and Oates 2017) by Fawaz et al. (2019), in 2,000 epochs,
https://github.com/hfawaz/dl-4-tsc; a network of InceptionTime (Fawaz et al. 2020); and the nearest
neighbour of the archive's DataSummary.csv.
"""

from __future__ import annotations

import argparse
import csv
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from statistics import mean, pstdev

from benchmarks.measure import add_save, heading, publish, table

PACKAGES = ("jax", "jaxlib", "aeon")
SEEDS = 5
PUBLISHED = {
    "GunPoint": ("1.000", "1.000", "0.913"),
    "ArrowHead": ("0.843 ± 0.011", "0.847 ± 0.025", "0.800"),
    "ItalyPowerDemand": ("0.963 ± 0.001", "0.964 ± 0.005", "0.955"),
}
"""Accuracy of FCN, of a network of InceptionTime, and of the nearest neighbour, by set."""


def train(name: str, folder: Path, keys: Sequence[str]) -> list[float]:
    """Train the recipe on a set with each seed, and return the accuracies after the last epoch."""
    words = [f"dataset.root=datasets/data/{name}", f"seed=range(1,{SEEDS + 1})", *keys]
    words += ["hydra.sweeper.vectorize=true", f"hydra.sweep.dir={folder}"]
    command = [sys.executable, "-m", "pipeline", "-m", "+recipe=fcn_series", *words]
    subprocess.run(command, check=True)
    return read_accuracies(folder / "sweep.csv")


def read_accuracies(file: Path) -> list[float]:
    """Return the accuracy of each job of a sweep. Raises ValueError for a job that isn't done."""
    with file.open(newline="") as opened:
        jobs = list(csv.DictReader(opened))
    wrong = [job["job"] for job in jobs if job["status"] != "done"]
    if wrong:
        raise ValueError(f"{file}: jobs {', '.join(wrong)} aren't done")
    return [float(job["metrics.accuracy"]) for job in jobs]


def list_rows(accuracies: dict[str, list[float]]) -> Iterator[list[str]]:
    """Yield a row of the table for each set."""
    for name, values in accuracies.items():
        ours = f"{mean(values):.3f} ± {pstdev(values):.3f}"
        yield [name, ours, f"{min(values):.3f} to {max(values):.3f}", *PUBLISHED[name]]


def main() -> None:
    """Measure and print a Markdown table."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("keys", nargs="*", help="keys of the recipe")
    add_save(parser, "series.md")
    args = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        accuracies = {name: train(name, Path(folder) / name, args.keys) for name in PUBLISHED}
    header = ["set", "here", "range", "FCN", "Inception", "1-NN"]
    command = " ".join(["python -m benchmarks.series", *args.keys, "--save"])
    parts = [
        heading("Series of the UCR archive", command, PACKAGES),
        f"Accuracy on the archive's test series after the last epoch: mean ± deviation of {SEEDS} "
        "seeds here, and published values (sources: `benchmarks/series.py`).\n",
        table(header, list_rows(accuracies)),
    ]
    publish("\n".join(parts), args.save)


if __name__ == "__main__":
    main()
