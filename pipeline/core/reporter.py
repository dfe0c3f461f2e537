"""Reporter: lines for the user on the console and in run.log, and a progress bar."""

from __future__ import annotations

import io
import logging
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock, Timer
from typing import IO, Literal, Self

from rich.console import Console

from pipeline.core.errors import discard, printable_lines
from pipeline.core.files.real_files import open_unshared

MARGIN = 10
"""Characters that the name of a stage has."""
SILENCE_S = 4.0
"""Seconds after which a stage that has printed nothing yet prints what it does."""
WARNING = f"{'warning':<{MARGIN}}"


class Reporter:
    """Print lines to the console and to `run.log`. Bars and clocks only on a terminal.

    Safe from any thread. If one of the two can't be written any more, a warning goes to the
    other, which is then the only one: a run is worth more than its lines. Without a `run.log` the
    OSError is raised. While it is `held`, lines for run.log wait for `write_held_lines`.
    """

    level = logging.WARNING
    """The least severe messages that `log` shows."""
    log_to: Literal["console", "stderr", "file"] = "console"
    """The output for them besides run.log, since they aren't lines of the run itself."""

    def __init__(
        self, run_dir: Path | None = None, console: Console | None = None, *, held: bool = False
    ) -> None:
        self.console = console or Console(soft_wrap=True, highlight=False, markup=False)
        self._one_at_a_time = Lock()
        self._log: IO[str] | None = None
        self._run_dir = run_dir
        self._held = io.StringIO() if held else None
        self._logs = run_dir is not None
        self._prints = True
        if run_dir is not None and not held:
            self._log = _open_log(run_dir)

    def write_held_lines(self) -> None:
        """Write the lines of a reporter that was `held` to its run.log, and later ones too."""
        with self._one_at_a_time:
            held = self._held
            self._held = None
            if held is not None and self._run_dir is not None:
                self._log = _open_log(self._run_dir)
                self._write(held.getvalue())

    def say(self, text: str) -> None:
        """Print one or more lines for the user; control characters are escaped."""
        text = printable_lines(text)
        with self._one_at_a_time:
            self._print(text)
            self._note(text)

    def _print(self, text: str) -> None:
        if not self._prints:
            return
        try:
            if self.console.is_terminal:
                self.console.print(text)
            else:
                # rich takes 0.3 ms a line, which a run without sinks would feel.
                print(text, file=self.console.file, flush=True)
        except OSError as error:
            if not self._logs:
                raise
            self._prints = False
            discard(self.console.file)
            why = f"can't be written ({error.strerror})"
            self._note(f"{WARNING} the console {why}; what there is to say is said here alone")

    def _note(self, text: str) -> None:
        line = f"{time.strftime('%H:%M:%S')} {text}\n"
        if self._held is not None:
            self._held.write(line)
        else:
            self._write(line)

    def _write(self, lines: str) -> None:
        if self._log is None:
            return
        try:
            self._log.write(lines)
        except OSError as error:
            log = self._log
            self._log = None
            with suppress(OSError):
                log.close()
            why = f"can't be written ({error.strerror})"
            self._print(f"{WARNING} {log.name} {why}: it ends here, and the run goes on")

    def stage(self, name: str, text: str) -> None:
        """Print what a stage did, its name in the margin."""
        self.say(f"{name:<{MARGIN}} {text}")

    def warn(self, text: str) -> None:
        """Print a warning, for which the run does not stop; run.log has it in any case."""
        if self.level > logging.WARNING:
            with self._one_at_a_time:
                self._note(printable_lines(f"{WARNING} {text}"))
        else:
            self.log(logging.WARNING, WARNING.strip(), text)

    def log(self, severity: int, name: str, text: str) -> None:
        """Print a message of a level of `logging`, its name in the margin, if it is severe
        enough."""
        if severity < self.level:
            return
        line = f"{name:<{MARGIN}} {text}"
        if self.log_to == "console":
            self.say(line)
            return
        line = printable_lines(line)
        with self._one_at_a_time:
            if self.log_to == "stderr":
                with suppress(OSError):
                    print(line, file=sys.stderr, flush=True)
            self._note(line)

    @contextmanager
    def clock(self, what: str) -> Iterator[None]:
        """Show elapsed time beside `what` during the body, on a terminal; elsewhere print `what`
        once if the body takes longer than SILENCE_S."""
        if not self.console.is_terminal:
            timer = Timer(SILENCE_S, self.stage, ("busy", what))
            timer.daemon = True
            # No thread can be started any more while the process ends.
            with suppress(RuntimeError):
                timer.start()
            try:
                yield
            finally:
                timer.cancel()
            return
        from rich.progress import Progress, TextColumn, TimeElapsedColumn

        with Progress(
            TextColumn("{task.description}"),
            TimeElapsedColumn(),
            console=self.console,
            transient=True,
        ) as progress:
            progress.add_task(what, total=None)
            yield

    def bar(self, total: int, done: int) -> Bar | None:
        """Open a progress bar over steps, to be closed at the end; None without a terminal."""
        return Bar(self.console, total, done) if self.console.is_terminal else None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._log is not None:
            # The rest of its buffer could not be written before.
            with suppress(OSError):
                self._log.close()
            self._log = None


def _open_log(run_dir: Path) -> IO[str]:
    path = run_dir / "run.log"
    return open(path, "a", encoding="utf-8", buffering=1, opener=open_unshared)


class Bar:
    """The progress bar of a run."""

    def __init__(self, console: Console, total: int, done: int) -> None:
        # Runs without a terminal would wait for its import.
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

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
        """Show that `step` steps are done."""
        self._progress.update(self._task, completed=step, loss=f"loss {loss:.4f}")

    def close(self) -> None:
        """Take the bar off the screen."""
        self._progress.stop()
