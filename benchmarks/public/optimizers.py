"""Optimizers, tuned equally by `arena`, beside what a study of large language models found.

    python -m benchmarks.public optimizers --save
    python -m benchmarks.public optimizers --from FOLDER      # of an arena that is done

Wen et al. (arXiv 2509.02046) tuned optimizers for language models of 0.1 to 1.2 billion parameters:
those with matrices as preconditioners, such as Muon and SOAP, need 1.4 times fewer steps than AdamW
at 0.1 billion, and 1.1 times fewer at 1.2 billion. So the published column is about another scale.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any

from benchmarks.measure import add_save, heading, publish, table
from benchmarks.public.figures import CACHE

BASELINE = "adamw"
PUBLISHED = {"adamw": "1", "muon": "1.1 to 1.4", "soap": "1.1 to 1.4"}
"""Speed in steps against tuned AdamW (abstract of arXiv 2509.02046)."""
HEADER = [
    "optimizer",
    "better, tied, worse",
    "speed in steps, median",
    "lowest to highest",
    "published",
    "score by steps",
]


def list_rows(results: Mapping[str, Any]) -> Iterator[list[str]]:
    """Yield a row of the table for each optimizer. Speed 0 is a target that is never reached by
    more than half of the runs."""
    workloads = results["workloads"]
    for name in (standing["value"] for standing in workloads[0]["standings"]):
        standings = [
            standing
            for workload in workloads
            for standing in workload["standings"]
            if standing["value"] == name
        ]
        verdicts = [standing["verdict"] for standing in standings]
        counts = ", ".join(str(verdicts.count(word)) for word in ("better", "tied", "worse"))
        speeds = [standing["speedup"] or 0.0 for standing in standings]
        yield [
            name,
            "" if name == BASELINE else counts,
            f"{median(speeds):.2f}",
            f"{min(speeds):.2f} to {max(speeds):.2f}",
            PUBLISHED.get(name, ""),
            f"{_find_score(results['score_by_steps'], name):.2f}",
        ]


def _find_score(scores: Any, name: str) -> float:
    if isinstance(scores, Mapping):
        return float(scores[name])
    return float(next(row["score"] for row in scores if row["value"] == name))


def main() -> None:
    """Run the arena if it isn't done, and print the table."""
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.public optimizers",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--trials", type=int, default=4)
    parser.add_argument("--seeds", type=int, default=6)
    parser.add_argument("--cache", type=Path, default=CACHE / "optimizers")
    parser.add_argument("--from", dest="folder", type=Path, help="the folder of an arena")
    add_save(parser, "public_optimizers.md")
    arguments = parser.parse_args()
    folder = arguments.folder or arguments.cache
    words = ["arena", "--trials", str(arguments.trials), "--seeds", str(arguments.seeds)]
    if arguments.folder is None:
        command = [sys.executable, "-m", "pipeline", *words, "--out", str(folder)]
        status = subprocess.run(command).returncode
        if status:
            raise SystemExit(status)
    file = folder / "results.json"
    if not file.is_file():
        parser.error(f"--from {folder}: has no results.json; name the folder of a finished arena")
    results = json.loads(file.read_text())
    runs = sum(
        standing["num_trials"] + standing["num_runs"]
        for workload in results["workloads"]
        for standing in workload["standings"]
    )
    about = f"{len(results['workloads'])} workloads, {runs} runs, against {BASELINE}.\n"
    title = heading("Optimizers", f"python -m pipeline {' '.join(words)}", ("jax", "jaxlib"))
    publish(f"{title}\n{about}\n{table(HEADER, list_rows(results))}", arguments.save)


if __name__ == "__main__":
    main()
