"""Kill workers of a sweep with SIGKILL and count its jobs.

    python -m tests.sweep_survival [--storage journal|database|none] [--workers 4] [--kills 3]
                                   [--trials 12] [--seed 1] [--folder DIR]

`none` is a plain grid, without Optuna. Every worker is the same command on the same directory; some
are killed at random moments in the middle of a job. The exit status is 0 if every job was finished
once.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import re
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.stages.record.member_runs import find_jobs
from tests.conftest import TINY

STEPS = 600
RUN = (f"train.steps={STEPS}", "train.sink_size=50", "checkpoint.every_steps=50")
STORAGES = ("journal", "database", "none")
DEADLINE_S = 600
COUNTS = {"workers": 4, "kills": 3, "trials": 12, "seed": 1}
"""Numeric options and their defaults."""


@dataclass(frozen=True)
class Survival:
    """Jobs of a sweep whose workers were killed, by outcome."""

    trials: int
    workers: int
    killed: int
    retried: int
    done: int
    done_twice: int
    lost: int
    exit_status: int
    """The highest exit status of the surviving workers."""

    @property
    def is_whole(self) -> bool:
        """Whether every job was finished, and once."""
        return (self.done, self.done_twice, self.lost, self.exit_status) == (self.trials, 0, 0, 0)

    def __str__(self) -> str:
        return (
            f"trials {self.trials}, workers {self.workers}, killed {self.killed}, "
            f"retried {self.retried}, done {self.done}, done twice {self.done_twice}, "
            f"lost {self.lost}"
        )


def survive(
    folder: Path,
    storage: str,
    *,
    workers: int,
    kills: int,
    trials: int,
    seed: int,
    cache: Path | None = None,
) -> Survival:
    """Start workers on one sweep in `folder`, kill some, and count the jobs of the sweep."""
    sweep_dir = folder / "sweep"
    draw = random.Random(seed)
    cache_override = [f"cache.root={cache}"] if cache else []
    place = f"hydra.sweep.dir={sweep_dir}"
    command = [*TINY, *RUN, *cache_override, place, *_search(storage, trials, folder)]
    processes = [_start(command, folder, number) for number in range(workers)]
    doomed = draw.sample(range(workers), kills)
    for number in doomed:
        _await_progress(processes[number], folder / f"{number}.out")
        time.sleep(draw.uniform(0, 0.5))
        processes[number].kill()
    statuses = [process.wait(DEADLINE_S) for process in processes]
    killed = sum(statuses[number] == -9 for number in doomed)
    worst = max(statuses[number] for number in range(workers) if number not in doomed)
    return _count(sweep_dir, trials, workers, killed, worst)


def _search(storage: str, trials: int, folder: Path) -> list[str]:
    if storage == "none":
        return [f"train.optimizer.lr={','.join(f'{0.001 * (n + 1):g}' for n in range(trials))}"]
    study = [
        "hydra/sweeper=optuna",
        f"hydra.sweeper.n_trials={trials}",
        "hydra/sweeper/pruner=none",
    ]
    if storage == "database":
        study.append(f"hydra.sweeper.storage=sqlite:///{folder / 'study.db'}")
    space = "train.optimizer.lr=tag(log,interval(0.001,0.05))"
    return [*study, "hydra.sweeper.heartbeat_s=1", space]


def _start(command: Sequence[str], folder: Path, number: int) -> subprocess.Popen[bytes]:
    with (folder / f"{number}.out").open("wb") as out:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", "-m", *command],
            cwd=folder,
            stdout=out,
            stderr=subprocess.STDOUT,
            env={**os.environ, "JAX_PLATFORMS": "cpu"},
        )


def _await_progress(process: subprocess.Popen[bytes], out: Path) -> None:
    """Wait until a worker is inside a job: it has printed the loss of another sink."""
    before = _count_losses(out)
    deadline = time.monotonic() + DEADLINE_S
    while _count_losses(out) == before and process.poll() is None:
        if time.monotonic() > deadline:
            raise TimeoutError(f"{out}: no step in {DEADLINE_S} s")
        time.sleep(0.02)


def _count_losses(out: Path) -> int:
    return out.read_bytes().count(b": loss ")


def _count(sweep_dir: Path, trials: int, workers: int, killed: int, worst: int) -> Survival:
    """Count the jobs by the files alone."""
    jobs = find_jobs(sweep_dir)
    whole = sum(_is_whole(job) for job in jobs)
    output = "".join(out.read_text() for out in sweep_dir.parent.glob("*.out"))
    retried = len(re.findall("^job .*, resumed$", output, re.MULTILINE))
    twice = sum(max(0, _count_endings(job) - 1) for job in jobs)
    lost = trials - whole
    return Survival(trials, workers, killed, retried, whole, twice, lost, worst)


def _count_endings(job: Path) -> int:
    """Count the lines of a job's log, after their time, that report its end."""
    lines = (job / "run.log").read_text().splitlines()
    return sum(line.split()[1:2] == ["done"] for line in lines)


def _is_whole(job: Path) -> bool:
    """Return whether a job is done and its log has every step once, in order."""
    try:
        status = json.loads((job / "summary.json").read_text())["status"]
        lines = (job / "metrics.jsonl").read_text().splitlines()
    except FileNotFoundError:
        return False
    steps = [json.loads(line)["step"] for line in lines]
    return status == "done" and steps == list(range(1, STEPS + 1))


def main() -> int:
    """Run the sweep and print its figures; return 0 if every job was finished once."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--storage", choices=STORAGES, default="journal")
    for name, default in COUNTS.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--folder", type=Path, help="where to keep the sweep; else it is removed")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as scratch:
        folder = (options.folder or Path(scratch)).absolute()
        folder.mkdir(parents=True, exist_ok=True)
        counts = {name: getattr(options, name) for name in COUNTS}
        survival = survive(folder, options.storage, **counts)
    print(f"{options.storage}: {survival} (seed {options.seed})")
    return 0 if survival.is_whole else 1


if __name__ == "__main__":
    sys.exit(main())
