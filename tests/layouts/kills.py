"""Kill a random process of a run in two processes.

    python -m tests.layouts.kills --kills 100 [--seed N]

A process gets SIGKILL at moments drawn uniformly from the lifetime of the run. The same command, or
a run on one or four devices of one process, resumes it until it is done. All processes must end
within 5 s of a kill; losses, evaluations and weights must equal an uninterrupted run.
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
    "train.epochs=null",
    "train.steps=3000",
    "train.sink_size=100",
    "train.dispatch_seconds=0.2",
    "checkpoint.every_steps=150",
    "eval.every_epochs=null",
    "eval.every_steps=500",
    "monitor.tensorboard=false",
    "monitor.sample_images=0",
    "parallel.mode=data",
)
TWO = ("launch=local", "launch.processes=2", "launch.heartbeat_seconds=10")
LAYOUTS = (TWO, TWO, ("parallel.devices=1",), ("parallel.devices=4",))
END_S = 5.0


def start(folder: Path, name: str, layout: tuple[str, ...]) -> subprocess.Popen[bytes]:
    """Start the run in a directory, or resume it."""
    run_dir = folder / name
    exists = (run_dir / "recipe.yaml").exists()
    place = f"train.resume={run_dir}" if exists else f"hydra.run.dir={run_dir}"
    with (folder / f"{name}.out").open("ab") as output:
        return subprocess.Popen(
            [sys.executable, "-m", "pipeline", *RUN, *layout, place, f"cache.root={folder}/cache"],
            stdout=output,
            stderr=subprocess.STDOUT,
        )


def list_workers(process: subprocess.Popen[bytes]) -> list[int]:
    """Return the IDs of the worker processes of a run, or of the run itself if it has none."""
    try:
        text = Path(f"/proc/{process.pid}/task/{process.pid}/children").read_text()
    except OSError:
        return []
    workers = []
    for pid in map(int, text.split()):
        try:
            if b"pipeline.cli.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                workers.append(pid)
        except OSError:
            continue
    return workers or [process.pid]


def kill_worker(process: subprocess.Popen[bytes], rng: random.Random) -> str | None:
    """Kill one of the processes; return a problem, or None."""
    workers = list_workers(process)
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
    remaining = [pid for pid in workers if pid != process.pid and Path(f"/proc/{pid}").exists()]
    return f"processes {remaining} are left" if remaining else None


def read_results(run_dir: Path) -> object:
    """Read the results that must be equal to those of an uninterrupted run."""
    arrays = {path: array.tobytes() for path, array in read_saved(run_dir).arrays.items()}
    return outcome.metrics(run_dir), outcome.read_lines(run_dir / "evals.jsonl"), arrays


def main() -> int:
    """Kill and compare; return 1 if anything is wrong."""
    parser = argparse.ArgumentParser(prog="python -m tests.layouts.kills", description=__doc__)
    parser.add_argument("--kills", type=int, default=100)
    parser.add_argument("--seed", type=int, default=0)
    options = parser.parse_args()
    rng = random.Random(options.seed)
    kills = 0
    runs = 0
    wrong: list[str] = []
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        assert start(folder, "warm", TWO).wait() == 0
        start_s = time.monotonic()
        assert start(folder, "whole", TWO).wait() == 0
        life_s = time.monotonic() - start_s
        while kills < options.kills:
            runs += 1
            run = f"run_{runs}"
            for _ in range(6):
                process = start(folder, run, rng.choice(LAYOUTS))
                try:
                    process.wait(rng.uniform(0, life_s))
                    break
                except subprocess.TimeoutExpired:
                    kills += 1
                    problem = kill_worker(process, rng)
                    wrong += [f"{run}: {problem}"] if problem else []
            else:
                process = start(folder, run, TWO)
            if process.wait() or read_results(folder / run) != read_results(folder / "whole"):
                wrong.append(f"{run}: differs; {(folder / f'{run}.out').read_text()[-1000:]}")
            print(f"{kills} kills, {runs} runs, {len(wrong)} wrong", flush=True)
    print("\n".join(wrong))
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
