"""Reporter: prints lines on the terminal and to run.log, and shows a progress bar."""

from __future__ import annotations

import io
import logging
import math
import os
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from importlib import import_module
from pathlib import Path
from threading import Lock, Timer
from typing import IO, Any, Literal, Self, TextIO

from rich.console import Console

from pipeline.core.errors import printable_lines, redirect_to_null
from pipeline.core.files.trusted_files import open_unshared
from pipeline.core.files.value_text import format_duration

MARGIN = 10
"""Width of the margin, in characters. It has the name of a stage or a severity."""
SILENCE_S = 4.0
"""Seconds of a task after which its name is printed, if there is no terminal for its clock."""
WARNING = f"{'warning':<{MARGIN}}"
"""Margin of a warning."""
BAR_WIDTH = 40
"""Width of a bar of time, in characters."""
MEMORY_S = 30.0
"""Seconds after which a step counts less in the remaining time, by a factor of e."""
KERNEL = "JPY_PARENT_PID"
"""Variable that Jupyter sets for kernels, and that their child processes inherit."""
NO_CURSOR = ("dumb", "unknown")
"""Values of TERM of terminals that can't move the cursor."""


class Reporter:
    """Prints lines to the console and to `run.log`, and shows bars and clocks on a terminal, and
    progress as one line in a notebook.

    Any thread may call its methods. If the console or `run.log` can't be written any more, a
    warning is written to the other output, and no error is raised. A reporter without `run.log`
    raises the console's OSError. With `delay_log`, lines for `run.log` stay in memory until
    `start_log` is called.
    """

    level = logging.WARNING
    """The lowest severity of messages that `log` prints."""
    log_to: Literal["console", "stderr", "file"] = "console"
    """Output of the messages of `log`. All are in run.log too; with "file", only there."""

    def __init__(
        self,
        run_dir: Path | None = None,
        console: Console | None = None,
        *,
        delay_log: bool = False,
    ) -> None:
        self.console = console or make_console()
        self._notebook_line: Any = None
        self._lock = Lock()
        self._log: IO[str] | None = None
        self._run_dir = run_dir
        self._buffer = io.StringIO() if delay_log else None
        self._has_log = run_dir is not None
        self._can_print = True
        if run_dir is not None and not delay_log:
            self._log = _open_log(run_dir)

    def start_log(self) -> None:
        """Write the lines in memory to run.log. Later lines are written when they are printed."""
        with self._lock:
            buffer = self._buffer
            self._buffer = None
            if buffer is not None and self._run_dir is not None:
                self._log = _open_log(self._run_dir)
                self._write(buffer.getvalue())

    def print_lines(self, text: str) -> None:
        """Print one or more lines for the user; control characters are escaped."""
        text = printable_lines(text)
        with self._lock:
            self._print(text)
            self._write_log_line(text)

    def _print(self, text: str) -> None:
        """Print to the console; if it can't be written, note that in run.log and stop printing."""
        if not self._can_print:
            return
        # A terminal of another encoding than UTF-8 lacks some characters of names and paths.
        encoding = getattr(self.console.file, "encoding", None) or "utf-8"
        text = text.encode(encoding, "backslashreplace").decode(encoding)
        try:
            if self.console.is_terminal:
                self.console.print(text)
            else:
                # rich takes 0.3 ms a line, which would slow runs with a line for each step.
                print(text, file=self.console.file, flush=True)
        except OSError as error:
            if not self._has_log:
                raise
            self._can_print = False
            redirect_to_null(self.console.file)
            problem = f"the console can't be written ({error.strerror})"
            self._write_log_line(f"{WARNING} {problem}; further lines are only in this log")

    def _write_log_line(self, text: str) -> None:
        """Write a line with the time to run.log, or to memory before `start_log`."""
        line = f"{time.strftime('%H:%M:%S')} {text}\n"
        if self._buffer is not None:
            self._buffer.write(line)
        else:
            self._write(line)

    def _write(self, lines: str) -> None:
        """Write to run.log; if that fails, close it and print a warning."""
        if self._log is None:
            return
        try:
            self._log.write(lines)
        except OSError as error:
            log = self._log
            self._log = None
            with suppress(OSError):
                log.close()
            problem = f"{log.name} can't be written ({error.strerror})"
            self._print(f"{WARNING} {problem}: it ends here, and the run goes on")

    def print_stage(self, name: str, text: str) -> None:
        """Print a line about a stage, with its name in the margin."""
        self.print_lines(f"{name:<{MARGIN}} {text}")

    def print_detail(self, name: str, text: str) -> None:
        """Write a line about a stage to run.log; print it too if `level` is info or below."""
        line = f"{name:<{MARGIN}} {text}"
        if self.level <= logging.INFO:
            self.print_lines(line)
            return
        with self._lock:
            self._write_log_line(printable_lines(line))

    def print_progress(self, name: str, text: str) -> None:
        """Print a line about progress. In a notebook, it replaces the last such line."""
        if not (self.console.is_jupyter and self.console.file is sys.stdout):
            self.print_stage(name, text)
            return
        line = printable_lines(f"{name:<{MARGIN}} {text}")
        with self._lock:
            self._show_in_notebook(line)
            self._write_log_line(line)

    def _show_in_notebook(self, line: str) -> None:
        """Show a line below the cell that shows lines for the first time, or replace its line."""
        # IPython is imported in every notebook, and isn't a requirement of this package.
        display = import_module("IPython.display").display
        output = {"text/plain": line}
        if self._notebook_line is None:
            self._notebook_line = display(output, raw=True, display_id=True)
        else:
            self._notebook_line.update(output, raw=True)

    def warn(self, text: str) -> None:
        """Write a warning to run.log, and print it unless `level` is above warnings."""
        if self.level > logging.WARNING:
            with self._lock:
                self._write_log_line(printable_lines(f"{WARNING} {text}"))
        else:
            self.log(logging.WARNING, "warning", text)

    def log(self, severity: int, name: str, text: str) -> None:
        """Print a message with `name` in the margin, if its severity is at least `level`.

        Severities are the levels of `logging`.
        """
        if severity < self.level:
            return
        line = f"{name:<{MARGIN}} {text}"
        if self.log_to == "console":
            self.print_lines(line)
            return
        line = printable_lines(line)
        with self._lock:
            if self.log_to == "stderr":
                with suppress(OSError):
                    print(line, file=sys.stderr, flush=True)
            self._write_log_line(line)

    @contextmanager
    def clock(self, task: str, expected_s: float | None = None) -> Iterator[None]:
        """Show the name of a task and the elapsed time on a terminal, during the body.

        With `expected_s`, the time that the task took before, there is a bar too. Without a
        terminal, print the name once if the body takes longer than SILENCE_S.
        """
        expected = f", {format_duration(expected_s)} before" if expected_s is not None else ""
        if not self.console.is_terminal:
            timer = Timer(SILENCE_S, self.print_stage, ("busy", f"{task}{expected}"))
            timer.daemon = True
            # While the process ends, no thread can be started.
            with suppress(RuntimeError):
                timer.start()
            try:
                yield
            finally:
                timer.cancel()
            return
        from rich.progress import Progress, ProgressColumn, TextColumn, TimeElapsedColumn
        from rich.progress_bar import ProgressBar

        class ExpectedTimeColumn(ProgressColumn):
            """A bar of the elapsed time, as a share of the expected time."""

            def render(self, task: Any) -> ProgressBar:
                total = expected_s or 0.0
                return ProgressBar(total, min(task.elapsed or 0.0, total), width=BAR_WIDTH)

        name = TextColumn("{task.description}")
        bars = [] if expected_s is None else [ExpectedTimeColumn()]
        columns = [name, *bars, TimeElapsedColumn(), TextColumn(expected.removeprefix(", "))]
        with Progress(*columns, console=self.console, transient=True) as progress:
            progress.add_task(task, total=None)
            yield

    def open_bar(self, total: int, done: int) -> Bar | None:
        """Open a bar of `total` steps, which the caller must close; None without a terminal."""
        return Bar(self.console, total, done) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            # Closing writes buffered lines, for which a full disk has no room.
            with suppress(OSError):
                self._log.close()
            self._log = None


def make_console(*, stderr: bool = False) -> Console:
    """Return the console of stdout or stderr, which has bars and clocks on a terminal alone.

    FORCE_COLOR would have them in a pipe, too.
    """
    is_terminal = can_redraw(sys.stderr if stderr else sys.stdout)
    return Console(
        stderr=stderr,
        force_terminal=None if is_terminal else False,
        soft_wrap=True,
        highlight=False,
        markup=False,
    )


def _open_log(run_dir: Path) -> IO[str]:
    path = run_dir / "run.log"
    return open(path, "a", encoding="utf-8", buffering=1, opener=open_unshared)


@dataclass
class RecentPace:
    """The seconds of a step, with whatever happens between steps, mostly of the recent steps.

    A step counts less the longer ago it was: by a factor of e in `MEMORY_S`, or in a quarter of the
    run so far if that is longer. So an evaluation doesn't change the remaining time much.
    """

    step: int
    started_at: float = field(default_factory=lambda: time.monotonic())
    _counted_at: float | None = None
    _steps: float = 0.0
    _seconds: float = 0.0

    def advance_to(self, step: int) -> float:
        """Count the steps up to `step`, done now; return the seconds of a step."""
        now = time.monotonic()
        elapsed_s = now - (self.started_at if self._counted_at is None else self._counted_at)
        share = math.exp(-elapsed_s / max(MEMORY_S, (now - self.started_at) / 4))
        self._steps = share * self._steps + max(0, step - self.step)
        self._seconds = share * self._seconds + elapsed_s
        self.step = step
        self._counted_at = now
        return self._seconds / self._steps if self._steps else 0.0


class Bar:
    """The progress bar of a run."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        # Imported here: runs without a terminal don't need it.
        from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn

        self._progress = Progress(
            TextColumn("step"),
            BarColumn(),
            MofNCompleteColumn(),
            TextColumn("{task.fields[left]}"),
            TextColumn("{task.fields[loss]}"),
            console=console,
            transient=True,
        )
        self._task = self._progress.add_task("train", total=total, completed=done, left="", loss="")
        self._total = total
        self._pace = RecentPace(done)
        self._progress.start()

    def advance_to(self, step: int, loss: float) -> None:
        """Show that `step` steps are done, with the last loss."""
        left_s = self._pace.advance_to(step) * (self._total - step)
        left = f"{format_duration(left_s)} left"
        self._progress.update(self._task, completed=step, left=left, loss=f"loss {loss:.4f}")

    def set_total(self, total: int) -> None:
        """Show `total` steps in all."""
        self._total = total
        self._progress.update(self._task, total=total)

    def close(self) -> None:
        """Remove the bar from the screen."""
        self._progress.stop()


def can_redraw(file: TextIO) -> bool:
    """Return whether a file is a terminal on which a line can be replaced.

    Not so is the pseudo-terminal that a notebook opens for `!command`: the notebook saves whatever
    is written to it, each frame of a bar too.
    """
    if KERNEL in os.environ or os.environ.get("TERM") in NO_CURSOR:
        return False
    return file.isatty()
