"""What the user reads while a run goes on: lines on the console and in run.log, a progress bar."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from threading import Lock
from typing import Self

from rich.console import Console
from rich.progress import (
    BarColumn,
    MofNCompleteColumn,
    Progress,
    TextColumn,
    TimeElapsedColumn,
    TimeRemainingColumn,
)


class Reporter:
    """Says things once, to the console and to `run.log`. Bars and clocks only on a terminal.

    Any thread may speak.
    """

    def __init__(self, run_dir: Path | None = None, console: Console | None = None) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self._one_at_a_time = Lock()
        self._log = None
        if run_dir is not None:
            self._log = (run_dir / "run.log").open("a", encoding="utf-8", buffering=1)

    def say(self, text: str) -> None:
        """One line (or more) for the user."""
        with self._one_at_a_time:
            if self.console.is_terminal:
                self.console.print(text)
            else:
                # rich takes 0.3 ms a line, which a run without sinks would feel.
                print(text, file=self.console.file, flush=True)
            if self._log is not None:
                self._log.write(f"{time.strftime('%H:%M:%S')} {text}\n")

    def stage(self, name: str, text: str) -> None:
        """What a stage did, its name in the margin."""
        self.say(f"{name:<10} {text}")

    def warn(self, text: str) -> None:
        """Something that the user should know and the run does not stop for."""
        self.stage("warning", text)

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """An elapsed clock beside `what` while it lasts, on a terminal."""
        if not self.console.is_terminal:
            yield
            return
        with Progress(
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        ) as progress:
            progress.add_task(what, total=None)
            yield

    def bar(self, total: int, done: int) -> Bar | None:
        """A progress bar over steps, to be closed in the end; None without a terminal."""
        return Bar(self.console, total, done) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            self._log.close()
            self._log = None


class Bar:
    """The progress bar of a run."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            TextColumn("{task.fields[loss]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=total, completed=done, loss="")
        self._progress.start()

    def advance_to(self, step: int, loss: float) -> None:
        """Show that so many steps are done."""
        self._progress.update(self._task, completed=step, loss=f"loss {loss:.4f}")

    def close(self) -> None:
        """Take the bar off the screen."""
        self._progress.stop()
