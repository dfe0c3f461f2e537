"""`python -m tests.layouts.kills --kills 100 [--seed N]`: kill -9 of a random process of two.

A run in two processes is killed at moments drawn uniformly from its lifetime and taken up by the
same command, or on one or four devices of one process, until it is done. After each kill no process
may be left within 5 s; in the end losses, evaluations and weights must be those of a run that was
never broken.
"""

from __future__ import annotations

import argparse
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

from pipeline.checkpoint.restore import read_saved
from tests import outcome

RUN = (
    "+recipe=lenet5_digits",
    "model=mlp",
    "model.hidden=[12]",
    "train.optimizer.lr=0.001",
    "train.passes=null",
    "train.steps=3000",
    "train.sink_size=100",
    "train.dispatch_seconds=0.2",
    "checkpoint.every_steps=150",
    "eval.every_passes=null",
    "eval.every_steps=500",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "parallel.mode=data",
)
TWO = ("launch=local", "launch.processes=2", "launch.heartbeat_seconds=10")
LAYOUTS = (TWO, TWO, ("parallel.devices=1",), ("parallel.devices=4",))
END_S = 5.0


def start(folder: Path, name: str, layout: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start the run in a directory, or go on with it."""
    run_dir = folder / name
    there = (run_dir / "recipe.yaml").exists()
    place = f"train.resume={run_dir}" if there else f"hydra.run.dir={run_dir}"
    with (folder / f"{name}.out").open("ab") as said:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *RUN, *layout, place, f"cache.root={folder}/cache"],
            stdout=said,
            stderr=subprocess.STDOUT,
        )


def workers_of(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the IDs of a run's processes; its own where it is alone."""
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except OSError:
        return []
    found = []
    for pid in map(int, text.split()):
        try:
            if b"pipeline.cli.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                found.append(pid)
        except OSError:
            continue
    return found or [process.pid]


def kill_one(process: subprocess.Popen[bytes], rng: random.Random) -> str | None:
    """Kill one of the processes; return what is wrong afterwards."""
    workers = workers_of(process)
    if not workers:
        return None
    try:
        os.kill(rng.choice(workers), signal.SIGKILL)
    except ProcessLookupError:
        return None
    try:
        process.wait(END_S)
    except subprocess.TimeoutExpired:
        process.kill()
        return f"the command runs {END_S:g} s after a kill"
    left = [pid for pid in workers if pid != process.pid and Path(f"/proc/{pid}").exists()]
    return f"processes {left} are left" if left else None


def result(run_dir: Path) -> object:
    """Return what must be equal."""
    arrays = {path: array.tobytes() for path, array in read_saved(run_dir).arrays.items()}
    return outcome.metrics(run_dir), outcome.read_lines(run_dir / "evals.jsonl"), arrays


def main() -> int:
    """Kill and compare; 1 where anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    asked = parser.parse_args()
    rng, kills, runs, wrong = random.Random(asked.seed), 0, 0, list[str]()
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert start(folder, "warm", TWO).wait() == 0
        started_at = time.monotonic()
        assert start(folder, "whole", TWO).wait() == 0
        life_s = time.monotonic() - started_at
        while kills < asked.kills:
            runs += 1
            run = f"run_{runs}"
            for _ in range(6):
                process = start(folder, run, rng.choice(LAYOUTS))
                try:
                    process.wait(rng.uniform(0, life_s))
                    break
                except subprocess.TimeoutExpired:
                    kills += 1
                    problem = kill_one(process, rng)
                    wrong += [f"{run}: {problem}"] if problem else []
            else:
                process = start(folder, run, TWO)
            if process.wait() or result(folder / run) != result(folder / "whole"):
                wrong.append(f"{run}: differs; {(folder / f'{run}.out').read_text()[-1000:]}")
            print(f"{kills} kills, {runs} runs, {len(wrong)} wrong", flush=True)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
