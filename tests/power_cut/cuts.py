"""Power cuts at random moments of a run, and what the resumed run must then be."""

from __future__ import annotations

import random
import re
import shutil
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from typing import Self

from pipeline.stages.record.run_directory import read_status
from tests.crash.killing import unlike
from tests.faults.preload import compile_library
from tests.faults.runs import Nursery
from tests.faults.scenarios import SHORT
from tests.power_cut.disk import Disk
from tests.power_cut.recording import SOURCE, Call, newest_saved, read_calls, recorded

ARGUMENTS = (
    *(argument for argument in SHORT if not argument.startswith(("hydra.", "checkpoint."))),
    "checkpoint.every_steps=8",
    "monitor.log_level=info",
    "train.resume=auto",
)
"""88 steps in two sinks, and 11 checkpoints."""
KEEPS = (1, 5)
AGAIN = 0.3
"""The share of resumed runs whose power is cut again."""
RESUMED = re.compile(r"^resume .* from step (\d+)$", re.MULTILINE)
WARNING = re.compile(r"^warning (?!.*it is complete again$).*", re.MULTILINE)
"""A warning, but not of a log that the checkpoint has repaired: a resumed run writes the line of
its first evaluation again, and the power may be cut when the old one is gone."""


@dataclass
class Tally:
    """What was counted; `wrong` must stay empty."""

    moments: int = 0
    with_checkpoint: int = 0
    """Moments at which the run had said that a checkpoint is on disk."""
    during_resume: int = 0
    """Moments at which a run was cut that had been resumed after a cut."""
    done: int = 0
    """Moments after which the run is done and needs no resume."""
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recording:
    """A run that went to its end: what was there before, and its calls."""

    before: Path
    calls: Sequence[Call]


class RecordedCuts:
    """Cuts of runs whose file operations are recorded; what is left is computed from these."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tally = Tally()
        self._folder, self._draw, self._stack = folder, random.Random(seed), ExitStack()
        library = compile_library(folder, SOURCE)
        self._nursery = self._stack.enter_context(Nursery(library))
        self._usual_warnings: set[str] = set()
        self._recordings = {keep: self._record_unbroken(keep) for keep in KEEPS}

    def cut_one_run(self, keep: int) -> None:
        """Cut the power of a run at a random moment and resume it, until it comes to its end."""
        recording, saved = self._recordings[keep], 0
        while recording is not None:
            number = self._draw.randint(0, len(recording.calls))
            calls = recording.calls[:number]
            # A resumed run adds to run.log.
            saved = max(saved, newest_saved(calls))
            name = f"keep_{keep}_moment_{self.tally.moments}"
            left = self._cut(recording.before, calls, self._folder / name)
            self.tally.moments += 1
            self.tally.with_checkpoint += saved > 0
            recording = self._resume(left, keep, saved)

    def _record_unbroken(self, keep: int) -> Recording:
        before = self._folder / f"keep_{keep}"
        before.mkdir()
        # The very first one compiles what all others find in the cache.
        for name in ("first", "unbroken") if keep == KEEPS[0] else ("unbroken",):
            recording, problems = self._run(before, self._folder / f"keep_{keep}_{name}", keep)
            self._usual_warnings.update(problems)
        disk = Disk(before)
        disk.make(recording.calls)
        disk.write(self._folder / "made")
        assert files_of(self._folder / "made") == files_of(self._unbroken(keep)), (
            "calls are missing"
        )
        shutil.rmtree(self._folder / "made")
        return recording

    def _unbroken(self, keep: int) -> Path:
        return self._folder / f"keep_{keep}_unbroken"

    def _cut(self, before: Path, calls: Sequence[Call], folder: Path) -> Path:
        disk = Disk(before)
        disk.make(calls)
        disk.cut_power(self._draw, folder)
        return folder

    def _resume(self, left: Path, keep: int, saved: int) -> Recording | None:
        """Resume a run and check what comes of it; returns its recording if it is to be cut."""
        resumed = left.with_name(f"{left.name}_resumed")
        problems, recording = [], None
        if is_done(left):
            self.tally.done += 1
            problems = differences(left, self._unbroken(keep))
        else:
            self.tally.resumed += 1
            recording, problems = self._run(left, resumed, keep, saved)
            problems = problems or differences(resumed, self._unbroken(keep))
        self.tally.wrong += [f"{left}: {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(resumed, ignore_errors=True)
            if recording is not None and self._draw.random() < AGAIN:
                self.tally.during_resume += 1
                return recording
            shutil.rmtree(left)
        return None

    def _run(
        self, before: Path, folder: Path, keep: int, saved: int = 0
    ) -> tuple[Recording, list[str]]:
        """Run in a copy of a folder to the end; returns the recording, and what is wrong."""
        shutil.copytree(before, folder)
        log = folder.with_name(f"{folder.name}.calls")
        arguments = [
            *ARGUMENTS,
            f"checkpoint.keep={keep}",
            f"cache.root={self._folder / 'cache'}",
        ]
        ended = self._nursery.run(arguments, folder, recorded(folder, log), whole=False)
        problems = [] if ended.status == 0 else [f"exit {ended.status}: {ended.console[-2000:]}"]
        steps = [int(step) for step in RESUMED.findall(ended.console)]
        if max(steps, default=0) < saved:
            problems.append(f"went on from {steps} and had saved {saved}: {ended.console[-2000:]}")
        warnings = set(WARNING.findall(ended.console))
        problems += sorted(warnings - self._usual_warnings)
        recording = Recording(before, read_calls(folder, log))
        log.unlink()
        return recording, problems

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def files_of(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def run_directories_in(folder: Path) -> list[Path]:
    """Return the directories of runs that have a recipe, which may be empty."""
    return [file.parent for file in folder.glob("outputs/*/*/recipe.yaml")]


def differences(folder: Path, unbroken: Path) -> list[str]:
    """Return where the run in a folder differs from the unbroken one in another."""
    (wanted,) = run_directories_in(unbroken)
    run_dirs = run_directories_in(folder)
    if len(run_dirs) != 1:
        return [f"there are {len(run_dirs)} runs"]
    try:
        return unlike(run_dirs[0], wanted)
    except (OSError, ValueError) as error:
        # orbax raises ValueError for damaged arrays.
        return [f"{run_dirs[0]}: {str(error)[:300]}"]


def is_done(folder: Path) -> bool:
    """Whether a run in a folder needs no resume, by its summary."""
    return any(read_status(run_dir) == "done" for run_dir in run_directories_in(folder))
