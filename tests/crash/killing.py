"""Runs that are killed with SIGKILL again and again, and must equal an uninterrupted run."""

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
from tests.crash.lives import ARGUMENTS, CONSOLE, find_run_dir, start

SPARED = 0.2
"""Share of lives that aren't killed: otherwise few runs would ever be done."""
AIMED = 1 / 3
"""Share of kills that wait until a checkpoint is being written."""
WRITE_S = 0.06
"""Aimed kills are drawn from this time after the start of a write."""
POLL_S = 0.0005
DRAFT = ".orbax-checkpoint-tmp"
SLOWEST_S = 300.0


@dataclass
class Tally:
    """Counts and problems; all lists must stay empty."""

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
        """All problems."""
        return [*self.failed, *self.mismatches, *self.unreadable, *self.lost]


class Crashes:
    """Kills runs of `steps` steps below `folder`, at moments drawn from `seed`."""

    def __init__(
        self, folder: Path, seed: int, steps: int, every_steps: int, arguments: Sequence[str] = ()
    ) -> None:
        self.tally = Tally()
        self._folder = folder
        self._draw = random.Random(seed)
        self._every_steps = every_steps
        length = (f"train.steps={steps}", f"checkpoint.every_steps={every_steps}")
        self._arguments = [*ARGUMENTS, *length, *arguments, "train.resume=auto"]
        # Twice: the first run compiles, the second measures the lifetime of a run.
        self._unbroken, _ = self._run_unbroken("first")
        repeated, self._life_s = self._run_unbroken("second")
        assert compare_runs(repeated, self._unbroken) == []

    def kill_one_run(self, kills: int) -> None:
        """Kill another run and resume it until it is done; no more than `kills` in all."""
        folder = self._make_folder(f"run_{self.tally.runs}")
        self._finish(folder, kills)
        self.tally.runs += 1

    def _run_unbroken(self, name: str) -> tuple[Path, float]:
        folder = self._make_folder(name)
        start_s = time.monotonic()
        process = start(self._arguments, folder)
        process.join(SLOWEST_S)
        run_dir = find_run_dir(folder)
        assert process.exitcode == 0, _read_console(folder)
        assert run_dir is not None
        return run_dir, time.monotonic() - start_s

    def _make_folder(self, name: str) -> Path:
        folder = self._folder / name
        folder.mkdir(parents=True)
        return folder

    def _finish(self, folder: Path, kills: int) -> None:
        """Start, kill and resume a run until it is done."""
        newest = 0
        while True:
            lives = len(_list_resumed_steps(folder))
            start_s = time.time()
            process = start(self._arguments, folder)
            killed = self.tally.kills < kills and self._kill(process, folder)
            process.join(SLOWEST_S)
            self._check_resumed(folder, newest, lives)
            if killed:
                self.tally.kills += 1
                newest = self._check_killed(folder, start_s)
            if not killed or _is_done(folder):
                self._check_done(0 if killed else process.exitcode, folder)
                return
            self.tally.resumes += 1

    def _kill(self, process: ForkServerProcess, folder: Path) -> bool:
        """Kill at a random moment, unless the run is spared or done before that."""
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

    def _check_killed(self, folder: Path, start_s: float) -> int:
        """Return the step to resume from; the life began at `start_s`, in UTC seconds."""
        run_dir = find_run_dir(folder)
        if run_dir is None:
            return 0
        root = run_dir / "checkpoints"
        drafts = root.glob(f"*{DRAFT}")
        self.tally.while_writing += any(draft.stat().st_mtime >= start_s for draft in drafts)
        newest = max(list_saved_steps(root), default=0)
        if newest:
            try:
                verify_files(root / str(newest))
            except DataError as error:
                self.tally.unreadable.append(str(error))
        done = _read_last_step(run_dir / "metrics.jsonl")
        self.tally.most_lost_steps = max(self.tally.most_lost_steps, done - newest)
        # The first step of an interval waits until the previous checkpoint is on disk.
        if newest < ((done - 1) // self._every_steps - 1) * self._every_steps:
            self.tally.lost.append(f"{run_dir}: at step {done}, newest checkpoint {newest}")
        return newest

    def _check_resumed(self, folder: Path, newest: int, lives: int) -> None:
        """Check that the run resumed from the newest checkpoint, if it got that far."""
        steps = _list_resumed_steps(folder)
        if len(steps) > lives and steps[-1] != newest:
            self.tally.lost.append(f"{folder}: resumed from {steps[-1]} instead of {newest}")

    def _check_done(self, status: int | None, folder: Path) -> None:
        run_dir = find_run_dir(folder)
        if status != 0 or run_dir is None:
            self.tally.failed.append(f"{folder}: exit {status}: {_read_console(folder)}")
        else:
            self.tally.mismatches += compare_runs(run_dir, self._unbroken)


def compare_runs(run_dir: Path, unbroken: Path) -> list[str]:
    """Return the differences in the bits of steps, evaluations and checkpoints."""
    problems = [
        f"{run_dir / name}: differs"
        for name in ("metrics.jsonl", "evals.jsonl")
        if (run_dir / name).read_bytes() != (unbroken / name).read_bytes()
    ]
    steps = outcome.checkpoints(run_dir)
    expected_steps = outcome.checkpoints(unbroken)
    if steps != expected_steps:
        return [*problems, f"{run_dir}: has checkpoints {steps}, not {expected_steps}"]
    for step in steps:
        arrays = outcome.arrays(run_dir, step)
        expected = outcome.arrays(unbroken, step)
        names = [name for name in expected if not _has_same_bits(arrays.get(name), expected[name])]
        problems += [f"{run_dir}: {name} of step {step} differs" for name in names]
    return problems


def _has_same_bits(array: np.ndarray | None, expected: np.ndarray) -> bool:
    if array is None or array.dtype != expected.dtype:
        return False
    return array.tobytes() == expected.tobytes()


def _wait_for_writes(process: ForkServerProcess, folder: Path, count: int) -> None:
    """Wait until the writes of `count` checkpoints have started, or the run is done."""
    drafts: set[str] = set()
    while len(drafts) < count and process.exitcode is None:
        for root in folder.glob("outputs/*/*/checkpoints"):
            drafts |= {name for name in os.listdir(root) if name.endswith(DRAFT)}
        time.sleep(POLL_S)


def _list_resumed_steps(folder: Path) -> list[int]:
    """Return the steps that the run was resumed from, by its log."""
    run_dir = find_run_dir(folder)
    log = (run_dir / "run.log").read_text() if run_dir and (run_dir / "run.log").exists() else ""
    return [int(step) for step in re.findall(r" resume  .* from step (\d+)\n", log)]


def _read_last_step(metrics: Path) -> int:
    """Return the step of the last complete line of a log, or 0."""
    if not metrics.exists():
        return 0
    lines = [line for line in metrics.read_bytes().splitlines(keepends=True) if b"\n" in line]
    match = re.match(rb'\{"step": (\d+)', lines[-1]) if lines else None
    return int(match[1]) if match else 0


def _is_done(folder: Path) -> bool:
    """Return whether a killed run had written everything and needs no resume."""
    run_dir = find_run_dir(folder)
    if run_dir is None or not (run_dir / "summary.json").exists():
        return False
    return outcome.read_summary(run_dir)["status"] == "done"


def _read_console(folder: Path) -> str:
    file = folder / CONSOLE
    return file.read_text()[-2000:] if file.exists() else "no output"
