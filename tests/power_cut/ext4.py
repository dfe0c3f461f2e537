"""Power cuts of an ext4 file system: it stops at once and replays its journal.

Needs root and a loop device. EXT4_IOC_SHUTDOWN keeps everything from the disk that the system
hasn't written before the cut.
"""

from __future__ import annotations

import fcntl
import os
import random
import subprocess
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from multiprocessing.context import ForkServerProcess
from pathlib import Path

from tests.crash.lives import CONSOLE, start
from tests.power_cut.cuts import (
    ARGUMENTS,
    KEEPS,
    RESUMED,
    WARNING,
    Tally,
    compare_folders,
    is_done,
    list_run_dirs,
)
from tests.power_cut.recording import SAVED

SHUTDOWN = 0x8004587D
"""EXT4_IOC_SHUTDOWN: _IOR('X', 125, __u32)."""
NO_FLUSH = (2).to_bytes(4, "little")
"""EXT4_GOING_FLAGS_NOLOGFLUSH: not even the journal is written."""
IMAGE_BYTES = 64 << 20
COMMIT_S = 1
"""Interval of writes of the journal; the default, 5 s, is longer than these runs."""
SLOWEST_S = 300.0


def explain_skip_ext4(folder: Path) -> str | None:
    """Return the reason why no ext4 file system can be mounted here, or None."""
    try:
        make_image(folder / "trial.img")
        with mount(folder / "trial.img", folder / "trial"):
            return None
    except FileNotFoundError as error:
        return f"there is no {error.filename}"
    except subprocess.CalledProcessError as error:
        return f"{error.cmd[0]}: {error.stderr.decode().strip()}"


def make_image(image: Path) -> None:
    """Make a file with an empty ext4 file system."""
    with image.open("wb") as file:
        file.truncate(IMAGE_BYTES)
    subprocess.run(["mkfs.ext4", "-q", "-F", str(image)], check=True, capture_output=True)


@contextmanager
def mount(image: Path, folder: Path) -> Iterator[Path]:
    """Mount an image, after a replay of its journal."""
    folder.mkdir(exist_ok=True)
    options = f"loop,commit={COMMIT_S}"
    command = ["mount", "-t", "ext4", "-o", options, str(image), str(folder)]
    subprocess.run(command, check=True, capture_output=True)
    try:
        yield folder
    finally:
        subprocess.run(["umount", str(folder)], check=True, capture_output=True)


class Ext4Cuts:
    """Cuts of runs on a separate ext4 file system."""

    def __init__(self, folder: Path, seed: int) -> None:
        self.tally = Tally()
        self._folder = folder
        self._draw = random.Random(seed)
        self._life_s = 0.0
        self._unbroken = {keep: self._run_unbroken(keep) for keep in KEEPS}

    def cut_one_run(self, keep: int) -> None:
        """Cut the power of a run at a random moment and resume it."""
        image = self._folder / "disk.img"
        make_image(image)
        with mount(image, self._folder / "disk") as disk:
            saved = self._cut(disk, keep)
        if saved is None:
            return
        self.tally.moments += 1
        self.tally.with_checkpoint += saved > 0
        with mount(image, self._folder / "disk") as disk:
            problems = self._resume(disk, keep, saved)
        self.tally.wrong += [f"keep={keep}, {saved} saved: {problem}" for problem in problems]

    def _arguments(self, keep: int) -> list[str]:
        return [*ARGUMENTS, f"checkpoint.keep={keep}", f"cache.root={self._folder / 'cache'}"]

    def _run_unbroken(self, keep: int) -> Path:
        for name in ("first", "unbroken"):
            folder = self._folder / f"keep_{keep}_{name}"
            folder.mkdir()
            start_s = time.monotonic()
            process = self._start(folder, keep)
            process.join(SLOWEST_S)
            assert process.exitcode == 0, _read_console(folder)
            self._life_s = time.monotonic() - start_s
        return folder

    def _start(self, folder: Path, keep: int) -> ForkServerProcess:
        return start(self._arguments(keep), folder)

    def _cut(self, disk: Path, keep: int) -> int | None:
        """Cut at a random moment; return the newest saved step, or None if the run was done.

        The process ends after the file system, so it can't change files any more.
        """
        process = self._start(disk, keep)
        process.join(self._draw.uniform(0, self._life_s))
        descriptor = os.open(disk, os.O_RDONLY)
        is_done_before = process.exitcode is not None
        saved = 0 if is_done_before else _find_newest_saved(disk)
        if not is_done_before:
            fcntl.ioctl(descriptor, SHUTDOWN, NO_FLUSH)
        os.close(descriptor)
        process.kill()
        process.join()
        return None if is_done_before else saved

    def _resume(self, disk: Path, keep: int, saved: int) -> list[str]:
        if is_done(disk):
            self.tally.done += 1
            return compare_folders(disk, self._unbroken[keep])
        self.tally.resumed += 1
        with suppress(FileNotFoundError):
            (disk / CONSOLE).unlink()
        process = self._start(disk, keep)
        process.join(SLOWEST_S)
        console = _read_console(disk)
        if process.exitcode != 0:
            return [f"exit {process.exitcode}: {console[-2000:]}"]
        steps = [int(step) for step in RESUMED.findall(console)]
        if max(steps, default=0) < saved:
            return [f"resumed from {steps}: {console[-2000:]}"]
        usual = WARNING.findall(_read_console(self._unbroken[keep]))
        warnings = [text for text in WARNING.findall(console) if text not in usual]
        return warnings or compare_folders(disk, self._unbroken[keep])


def _find_newest_saved(folder: Path) -> int:
    logs = [run_dir / "run.log" for run_dir in list_run_dirs(folder)]
    steps = [int(n) for log in logs if log.exists() for n in SAVED.findall(log.read_bytes())]
    return max(steps, default=0)


def _read_console(folder: Path) -> str:
    file = folder / CONSOLE
    return file.read_text(errors="replace") if file.exists() else ""
