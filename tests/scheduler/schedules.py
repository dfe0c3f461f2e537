"""A scheduler that kills, stops, shrinks and moves jobs, and starts them again."""

from __future__ import annotations

import multiprocessing
import os
import random
import signal
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests import outcome
from tests.compiling import compile_quickly
from tests.conftest import TINY
from tests.crash.killing import _has_same_bits
from tests.scheduler.faulty_storage import register_faulty_storage

CONTEXT = multiprocessing.get_context("forkserver")
IMPORTED = ["tests.scheduler.schedules", "pipeline.cli.train", "pipeline.stages.run"]
CONSOLE = "console.txt"
STEPS = 300
RESTORED = "mirror     step"
"""Beginning of a line of a restored run."""
RETRY = os.EX_TEMPFAIL
SLOWEST_S = 400.0
AIMED = 0.8
"""The share of kills and stops while checkpoints are copied."""
MOST_LIVES = 6
"""Lives of a job after which it is left in peace."""
NETWORK = (
    "[{name: conv, features: 4, kernel: 3, stride: 2},batch_norm,relu,flatten,"
    "{name: dropout, rate: 0.2},{name: dense, features: $classes}]"
)
RECIPES = {
    "mlp": ("model=mlp", "model.hidden=[8]", "train.loss_scale={name: dynamic, init: 64.0}"),
    "conv": ("model=layers", f"model.layers={NETWORK}", "optimizer=adam", "train.ema.decay=0.9"),
    "stream": ("model=mlp", "model.hidden=[12,8]", "train.feed=stream", "train.sink_size=7"),
}
KEYS = (
    *(key for key in TINY if not key.startswith("train.batch_size")),
    "train.batch_size=16",
    f"train.steps={STEPS}",
    "train.dispatch_seconds=0.05",
    "checkpoint.every_steps=10",
    "checkpoint.keep=3",
    "checkpoint.best=loss",
    "eval.every_steps=100",
    "eval.every_epochs=null",
    "parallel.mode=data",
    "parallel.shards=8",
    "train.resume=auto",
)
SIZES = (4, 3, 1)
"""Machines that the scheduler has for a job; it takes some away, and never adds one."""
DEVICES = {4: 4, 3: 2, 1: 1}
"""Devices, or processes, of a job on so many machines: a number that divides its shards."""


@dataclass
class Tally:
    """What the scheduler did, and `wrong`, which must stay empty."""

    jobs: int = 0
    kills: int = 0
    stops: int = 0
    shrinks: int = 0
    moves: int = 0
    restored: int = 0
    wrong: list[str] = field(default_factory=list)


class Scheduler:
    """Runs jobs below `folder`, with events drawn from `seed`.

    Mirrors are at s3://, in a folder whose operations fail with the probability `faults`. With
    `in_processes`, a job has processes instead of devices.
    """

    def __init__(
        self, folder: Path, seed: int, cache: Path, faults: float, *, in_processes: bool = False
    ) -> None:
        self.tally = Tally()
        self._folder = folder
        self._random = random.Random(seed)
        self._cache = cache
        self._faults = faults
        self._in_processes = in_processes
        self._unbroken: dict[str, tuple[Path, float]] = {}

    def run_job(self, name: str) -> None:
        """Run the job of a recipe to its end by all events, and compare it with a whole run."""
        whole, life_s = self._run_whole(name)
        number = self.tally.jobs
        self.tally.jobs += 1
        mirror = f"checkpoint.mirror=s3://bucket/job_{number}"
        machine = self._make_machine(f"job_{number}_0")
        size = SIZES[0]
        for life in range(1, MOST_LIVES + 1):
            before = read_console(machine).count(RESTORED)
            process = self.start(machine, [*RECIPES[name], mirror], size)
            bucket = self._folder / f"buckets/bucket/job_{number}"
            event = self._disturb(process, life_s, bucket) if life < MOST_LIVES else "none"
            process.join(SLOWEST_S)
            self.tally.restored += read_console(machine).count(RESTORED) - before
            if process.exitcode == 0:
                self._compare(machine, whole)
                return
            if not is_retried(process.exitcode):
                console = read_console(machine)[-3000:]
                self.tally.wrong.append(f"{machine}: {event}: exit {process.exitcode}: {console}")
                return
            if size != SIZES[-1] and self._random.random() < 0.4:
                size = SIZES[SIZES.index(size) + 1]
                self.tally.shrinks += 1
            if self._random.random() < 0.5:
                machine = self._make_machine(f"job_{number}_{life}")
                self.tally.moves += 1
        self.tally.wrong.append(f"{machine}: isn't done: {read_console(machine)[-2000:]}")

    def start(self, machine: Path, keys: Sequence[str], size: int) -> ForkServerProcess:
        """Start a job on a machine, a folder, with the devices or processes of `size` machines."""
        devices = DEVICES[size]
        layout = [f"parallel.devices={devices}"]
        if self._in_processes and devices > 1:
            layout += ["launch=local", f"launch.processes={devices}"]
        arguments = [*KEYS, *keys, *layout, f"cache.root={self._cache}"]
        CONTEXT.set_forkserver_preload(IMPORTED)
        share = self._faults
        process = CONTEXT.Process(
            target=_live, args=(arguments, machine, self._folder / "buckets", share)
        )
        process.start()
        return process

    def _make_machine(self, name: str) -> Path:
        machine = self._folder / name
        machine.mkdir(parents=True)
        return machine

    def _run_whole(self, name: str) -> tuple[Path, float]:
        """Run a recipe without a mirror and events; return its directory and seconds."""
        if name not in self._unbroken:
            for attempt in ("compiling", "whole"):
                machine = self._make_machine(f"{name}_{attempt}")
                started_at = time.monotonic()
                process = self.start(machine, RECIPES[name], SIZES[-1])
                process.join(SLOWEST_S)
                assert process.exitcode == 0, read_console(machine)
            self._unbroken[name] = find_done_runs(machine)[0], time.monotonic() - started_at
        return self._unbroken[name]

    def _disturb(self, process: ForkServerProcess, life_s: float, bucket: Path) -> str:
        """Kill or stop a process at a random moment, or leave it alone.

        Most moments are while checkpoints are copied to `bucket`, since the start takes longest.
        """
        event = self._random.choice(("kill", "kill", "stop", "stop", "none"))
        if self._random.random() < AIMED:
            _wait_for_records(process, bucket, self._random.randint(1, 4))
            process.join(self._random.uniform(0, 0.2))
        else:
            process.join(self._random.uniform(0.2, 1.3) * life_s)
        if event == "none" or process.exitcode is not None:
            return "none"
        if event == "kill":
            process.kill()
            self.tally.kills += 1
        else:
            process.terminate()
            self.tally.stops += 1
        return event

    def _compare(self, machine: Path, whole: Path) -> None:
        """Compare all runs that are done on a machine. A job that is killed after its run was done,
        but before the process ended, is started again and does another run."""
        for run_dir in find_done_runs(machine):
            self.tally.wrong += [
                f"{run_dir / name}: differs"
                for name in ("metrics.jsonl", "evals.jsonl")
                if (run_dir / name).read_bytes() != (whole / name).read_bytes()
            ]
            here = outcome.arrays(run_dir, STEPS)
            there = outcome.arrays(whole, STEPS)
            self.tally.wrong += [
                f"{run_dir}: {path} differs"
                for path in there
                if not _has_same_bits(here.get(path), there[path])
            ]


def is_retried(status: int | None) -> bool:
    """Return whether a job is started again: not after 1 or 2, which another attempt would give."""
    return status in (RETRY, -signal.SIGKILL)


def _wait_for_records(process: ForkServerProcess, bucket: Path, count: int) -> None:
    """Wait until a process has copied so many checkpoints, or has ended."""
    before = set(bucket.glob("*/records/*.json"))
    while process.exitcode is None and len({*bucket.glob("*/records/*.json")} - before) < count:
        time.sleep(0.001)


def find_done_runs(machine: Path) -> list[Path]:
    """Return the directories of the runs that are done on a machine, at least one."""
    done = [
        file.parent
        for file in sorted(machine.glob("outputs/*/*/summary.json"))
        if outcome.read_summary(file.parent)["status"] == "done"
    ]
    assert done, f"{machine}: no run is done"
    return done


def read_console(machine: Path) -> str:
    """Return the lines of all processes on a machine."""
    file = machine / CONSOLE
    return file.read_text() if file.exists() else ""


def _live(arguments: list[str], machine: Path, buckets: Path, share: float) -> None:
    """Be a job's process: `python -m pipeline` in a machine's folder."""
    from pipeline.__main__ import main
    from pipeline.core.host.signals import interrupt_command

    interrupt_command()
    # Bits of programs for different numbers of devices are compared.
    compile_quickly(False)
    os.chdir(machine)
    with Path(CONSOLE).open("a") as console:
        os.dup2(console.fileno(), sys.stdout.fileno())
        os.dup2(console.fileno(), sys.stderr.fileno())
    register_faulty_storage(buckets, share)
    sys.exit(main(["+recipe=lenet5_digits", *arguments]))
