"""Power cuts at random moments of a run, and checks of the resumed run."""

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
from tests.crash.killing import compare_runs
from tests.faults.preload import compile_library
from tests.faults.runs import Nursery
from tests.faults.scenarios import SHORT
from tests.power_cut.disk import Disk
from tests.power_cut.recording import SOURCE, Call, find_newest_saved, make_settings, read_calls

ARGUMENTS = (
    *(argument for argument in SHORT if not argument.startswith(("hydra.", "checkpoint."))),
    "checkpoint.every_steps=8",
    "monitor.log_level=info",
    "train.resume=auto",
)
"""88 steps in two sinks, and 11 checkpoints."""
KEEPS = (1, 5)
REPEATED = 0.3
"""Share of resumed runs whose power is cut again."""
RESUMED = re.compile(r"^resume .* from step (\d+)$", re.MULTILINE)
WARNING = re.compile(r"^warning (?!.*it is complete again$).*", re.MULTILINE)
"""A warning, except of a log that the checkpoint has repaired: a resumed run rewrites the line of
its first evaluation, and the power may be cut after the old line is removed."""


@dataclass
class Tally:
    """Counts and problems; `wrong` must stay empty."""

    moments: int = 0
    with_checkpoint: int = 0
    """Moments after the run had reported that a checkpoint is on disk."""
    during_resume: int = 0
    """Moments in a run that had been resumed after a cut."""
    done: int = 0
    """Moments after which the run is done and needs no resume."""
    resumed: int = 0
    wrong: list[str] = field(default_factory=list)


@dataclass(frozen=True)
class Recording:
    """A complete run: the folder before it, and its calls."""

    before: Path
    calls: Sequence[Call]


class RecordedCuts:
    """Cuts of runs whose file operations are recorded; the remaining files are computed."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tally = Tally()
        self._folder = folder
        self._draw = random.Random(seed)
        self._stack = ExitStack()
        library = compile_library(folder, SOURCE)
        self._nursery = self._stack.enter_context(Nursery(library))
        self._usual_warnings: set[str] = set()
        self._recordings = {keep: self._record_unbroken(keep) for keep in KEEPS}

    def cut_one_run(self, keep: int) -> None:
        """Cut the power of a run at random moments and resume it until it is done."""
        recording: Recording | None = self._recordings[keep]
        saved = 0
        while recording is not None:
            number = self._draw.randint(0, len(recording.calls))
            calls = recording.calls[:number]
            # A resumed run adds to run.log.
            saved = max(saved, find_newest_saved(calls))
            name = f"keep_{keep}_moment_{self.tally.moments}"
            remains = self._cut(recording.before, calls, self._folder / name)
            self.tally.moments += 1
            self.tally.with_checkpoint += saved > 0
            recording = self._resume(remains, keep, saved)

    def _record_unbroken(self, keep: int) -> Recording:
        before = self._folder / f"keep_{keep}"
        before.mkdir()
        # The very first run compiles the programs of all others.
        for name in ("first", "unbroken") if keep == KEEPS[0] else ("unbroken",):
            recording, problems = self._run(before, self._folder / f"keep_{keep}_{name}", keep)
            self._usual_warnings.update(problems)
        disk = Disk(before)
        disk.apply(recording.calls)
        disk.write(self._folder / "written")
        assert read_files(self._folder / "written") == read_files(self._unbroken(keep)), (
            "calls are missing"
        )
        shutil.rmtree(self._folder / "written")
        return recording

    def _unbroken(self, keep: int) -> Path:
        return self._folder / f"keep_{keep}_unbroken"

    def _cut(self, before: Path, calls: Sequence[Call], folder: Path) -> Path:
        disk = Disk(before)
        disk.apply(calls)
        disk.cut_power(self._draw, folder)
        return folder

    def _resume(self, remains: Path, keep: int, saved: int) -> Recording | None:
        """Resume a run and check it; return its recording if its power is cut again."""
        resumed = remains.with_name(f"{remains.name}_resumed")
        recording = None
        if is_done(remains):
            self.tally.done += 1
            problems = compare_folders(remains, self._unbroken(keep))
        else:
            self.tally.resumed += 1
            recording, problems = self._run(remains, resumed, keep, saved)
            problems = problems or compare_folders(resumed, self._unbroken(keep))
        self.tally.wrong += [f"{remains}: {problem}" for problem in problems]
        if not problems:
            shutil.rmtree(resumed, ignore_errors=True)
            if recording is not None and self._draw.random() < REPEATED:
                self.tally.during_resume += 1
                return recording
            shutil.rmtree(remains)
        return None

    def _run(
        self, before: Path, folder: Path, keep: int, saved: int = 0
    ) -> tuple[Recording, list[str]]:
        """Run in a copy of a folder to the end; return the recording and the problems."""
        shutil.copytree(before, folder)
        log = folder.with_name(f"{folder.name}.calls")
        arguments = [
            *ARGUMENTS,
            f"checkpoint.keep={keep}",
            f"cache.root={self._folder / 'cache'}",
        ]
        result = self._nursery.run(arguments, folder, make_settings(folder, log), whole=False)
        output = result.console[-2000:]
        problems = [] if result.status == 0 else [f"exit {result.status}: {output}"]
        steps = [int(step) for step in RESUMED.findall(result.console)]
        if max(steps, default=0) < saved:
            problems.append(f"resumed from {steps} and had saved {saved}: {output}")
        warnings = set(WARNING.findall(result.console))
        problems += sorted(warnings - self._usual_warnings)
        recording = Recording(before, read_calls(folder, log))
        log.unlink()
        return recording, problems

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._stack.close()


def read_files(folder: Path) -> dict[str, bytes]:
    """Return the content of all files below a folder by path."""
    files = (path for path in folder.rglob("*") if path.is_file())
    return {str(path.relative_to(folder)): path.read_bytes() for path in files}


def list_run_dirs(folder: Path) -> list[Path]:
    """Return the directories of runs with a recipe, which may be empty."""
    return [file.parent for file in folder.glob("outputs/*/*/recipe.yaml")]


def compare_folders(folder: Path, unbroken: Path) -> list[str]:
    """Return the differences of the run in a folder from the unbroken run in another folder."""
    (expected,) = list_run_dirs(unbroken)
    run_dirs = list_run_dirs(folder)
    if len(run_dirs) != 1:
        return [f"there are {len(run_dirs)} runs"]
    try:
        return compare_runs(run_dirs[0], expected)
    except (OSError, ValueError) as error:
        # Orbax raises ValueError for damaged arrays.
        return [f"{run_dirs[0]}: {str(error)[:300]}"]


def is_done(folder: Path) -> bool:
    """Return whether a run in a folder needs no resume, by its summary."""
    return any(read_status(run_dir) == "done" for run_dir in list_run_dirs(folder))
