"""Runs that are killed with SIGKILL again and again, and must end as one that never was."""

from __future__ import annotations

import os
import random
import re
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import numpy as np

from pipeline.checkpoint.checkpoint_folder import list_saved_steps
from pipeline.checkpoint.manifest import verify_files
from pipeline.core.errors import DataError
from tests import outcome
from tests.crash.lives import ARGUMENTS, CONSOLE, run_directory_in, start

SPARED = 0.2
"""The share of lives that are not to be killed: else few runs would ever be done."""
AIMED = 1 / 3
"""The share of kills that wait until a checkpoint is being written."""
WRITE_S = 0.06
"""Of this long after a write has begun, aimed kills are drawn."""
POLL_S = 0.0005
DRAFT = ".orbax-checkpoint-tmp"
SLOWEST_S = 300.0


@dataclass
class Tally:
    """What was counted; everything from `failed` on must stay empty."""

    kills: int = 0
    while_writing: int = 0
    resumes: int = 0
    runs: int = 0
    most_lost_steps: int = 0
    failed: list[str] = field(default_factory=list)
    mismatches: list[str] = field(default_factory=list)
    unreadable: list[str] = field(default_factory=list)
    lost: list[str] = field(default_factory=list)

    @property
    def wrong(self) -> list[str]:
        """All that must not be."""
        return [*self.failed, *self.mismatches, *self.unreadable, *self.lost]


class Crashes:
    """Kills runs of so many steps below `folder`, at moments drawn from `seed`."""

    def __init__(
        self, folder: Path, seed: int, steps: int, every_steps: int, arguments: Sequence[str] = ()
    ) -> None:
        self.tally = Tally()
        self._folder, self._draw, self._every_steps = folder, random.Random(seed), every_steps
        length = f"train.steps={steps}", f"checkpoint.every_steps={every_steps}"
        self._arguments = [*ARGUMENTS, *length, *arguments, "train.resume=auto"]
        # Twice: the first one compiles, the second tells how long a run takes.
        self._unbroken, _ = self._run_unbroken("first")
        again, self._life_s = self._run_unbroken("second")
        assert unlike(again, self._unbroken) == []

    def kill_one_run(self, kills: int) -> None:
        """Kill another run and take it up until it is done; `kills` in all are enough."""
        folder = self._make_folder(f"run_{self.tally.runs}")
        self._finish(folder, kills)
        self.tally.runs += 1

    def _run_unbroken(self, name: str) -> tuple[Path, float]:
        folder, begun = self._make_folder(name), time.monotonic()
        process = start(self._arguments, folder)
        process.join(SLOWEST_S)
        run_dir = run_directory_in(folder)
        assert process.exitcode == 0, _console(folder)
        assert run_dir is not None
        return run_dir, time.monotonic() - begun

    def _make_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return folder

    def _finish(self, folder: Path, kills: int) -> None:
        """One run: started, killed and taken up until it is done."""
        wanted = 0
        while True:
            lives, begun = len(_resumed_from(folder)), time.time()
            process = start(self._arguments, folder)
            killed = self.tally.kills < kills and self._kill(process, folder)
            process.join(SLOWEST_S)
            self._check_resumed(folder, wanted, lives)
            if killed:
                self.tally.kills += 1
                wanted = self._check_killed(folder, begun)
            if not killed or _is_done(folder):
                self._check_done(0 if killed else process.exitcode, folder)
                return
            self.tally.resumes += 1

    def _kill(self, process: ForkServerProcess, folder: Path) -> bool:
        """Kill at a random moment, unless the run is spared or done before."""
        if self._draw.random() < SPARED:
            return False
        if self._draw.random() < AIMED:
            _wait_for_writes(process, folder, self._draw.randint(1, 6))
            process.join(self._draw.uniform(0, WRITE_S))
        else:
            process.join(self._draw.uniform(0, self._life_s))
        if process.exitcode is not None:
            return False
        process.kill()
        process.join()
        return process.exitcode == -9

    def _check_killed(self, folder: Path, begun: float) -> int:
        """The step from which the run must go on, which was started at `begun`, in UTC seconds."""
        run_dir = run_directory_in(folder)
        if run_dir is None:
            return 0
        root = run_dir / "checkpoints"
        drafts = root.glob(f"*{DRAFT}")
        self.tally.while_writing += any(draft.stat().st_mtime >= begun for draft in drafts)
        newest = max(list_saved_steps(root), default=0)
        if newest:
            try:
                verify_files(root / str(newest))
            except DataError as error:
                self.tally.unreadable.append(str(error))
        done = _last_step(run_dir / "metrics.jsonl")
        self.tally.most_lost_steps = max(self.tally.most_lost_steps, done - newest)
        # The first step of an interval waits until the checkpoint of the one before is on disk.
        if newest < ((done - 1) // self._every_steps - 1) * self._every_steps:
            self.tally.lost.append(f"{run_dir}: at step {done}, and the newest is of {newest}")
        return newest

    def _check_resumed(self, folder: Path, wanted: int | None, lives: int) -> None:
        """Did it go on from the newest checkpoint, if it got as far as that?"""
        told = _resumed_from(folder)
        if len(told) > lives and told[-1] != wanted:
            self.tally.lost.append(f"{folder}: went on from {told[-1]} instead of {wanted}")

    def _check_done(self, status: int | None, folder: Path) -> None:
        run_dir = run_directory_in(folder)
        if status != 0 or run_dir is None:
            self.tally.failed.append(f"{folder}: exit {status}: {_console(folder)}")
        else:
            self.tally.mismatches += unlike(run_dir, self._unbroken)


def unlike(run_dir: Path, unbroken: Path) -> list[str]:
    """Where two runs are not equal to the bit: every step, evaluation and checkpoint."""
    wrong = [
        f"{run_dir / name}: is another"
        for name in ("metrics.jsonl", "evals.jsonl")
        if (run_dir / name).read_bytes() != (unbroken / name).read_bytes()
    ]
    kept, wanted = outcome.checkpoints(run_dir), outcome.checkpoints(unbroken)
    if kept != wanted:
        return [*wrong, f"{run_dir}: has checkpoints {kept}, not {wanted}"]
    for step in kept:
        one, other = outcome.arrays(run_dir, step), outcome.arrays(unbroken, step)
        names = [name for name in other if not _same_bits(one.get(name), other[name])]
        wrong += [f"{run_dir}: {name} of step {step} is another" for name in names]
    return wrong


def _same_bits(one: np.ndarray | None, other: np.ndarray) -> bool:
    return one is not None and one.dtype == other.dtype and one.tobytes() == other.tobytes()


def _wait_for_writes(process: ForkServerProcess, folder: Path, count: int) -> None:
    """Until so many checkpoints have begun to be written, or the run is done."""
    seen: set[str] = set()
    while len(seen) < count and process.exitcode is None:
        for root in folder.glob("outputs/*/*/checkpoints"):
            seen |= {name for name in os.listdir(root) if name.endswith(DRAFT)}
        time.sleep(POLL_S)


def _resumed_from(folder: Path) -> list[int]:
    """The step that each life of a run began with, of those that came to say so."""
    run_dir = run_directory_in(folder)
    log = (run_dir / "run.log").read_text() if run_dir and (run_dir / "run.log").exists() else ""
    return [int(step) for step in re.findall(r" resume  .* from step (\d+)\n", log)]


def _last_step(metrics: Path) -> int:
    """The last step that the log has whole, 0 where it has none."""
    if not metrics.exists():
        return 0
    whole = [line for line in metrics.read_bytes().splitlines(keepends=True) if b"\n" in line]
    found = re.match(rb'\{"step": (\d+)', whole[-1]) if whole else None
    return int(found[1]) if found else 0


def _is_done(folder: Path) -> bool:
    """A run may be killed when all is written, and has nothing left to resume."""
    run_dir = run_directory_in(folder)
    if run_dir is None or not (run_dir / "summary.json").exists():
        return False
    return outcome.read_summary(run_dir)["status"] == "done"


def _console(folder: Path) -> str:
    file = folder / CONSOLE
    return file.read_text()[-2000:] if file.exists() else "nothing was said"
