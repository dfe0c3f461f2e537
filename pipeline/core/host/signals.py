"""Signals: SIGTERM, SIGINT and SIGHUP stop a run, SIGUSR1 makes it save a checkpoint and continue.

During training, a signal to stop is recorded, and training stops after the current dispatch: steps
are saved, an evaluation is abandoned. At other times nothing would be lost, and the signal raises
Interrupted. So does a second signal at any time, unless it is SIGHUP, which both the shell and the
system send when a terminal closes. Later signals are ignored, since the run is already ending.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run. SIGHUP is sent when the terminal or its connection is closed."""
SAVE = signal.SIGUSR1


class Interrupted(KeyboardInterrupt):
    """A signal has stopped a run. The message has the signal's name."""


class Signals:
    """The requests that a run has received by signals."""

    def __init__(self) -> None:
        self.stop: str | None = None
        """Text about the first signal to stop, such as `SIGTERM received`."""
        self.saves = 0
        """Number of signals that requested a checkpoint."""
        self._is_held = False
        self._has_interrupted = False

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Raises Interrupted, at most once, for a signal to stop that isn't held
        by `hold_stops` or is the second one. While a module is imported, it isn't raised."""
        if number == SAVE:
            self.saves += 1
            return
        if number == signal.SIGHUP and self.stop is not None:
            return
        text = f"{signal.Signals(number).name} received"
        is_first = self.stop is None
        self.stop = self.stop or text
        can_wait = (is_first and self._is_held) or is_importing(frame)
        if not self._has_interrupted and not can_wait:
            self._has_interrupted = True
            raise Interrupted(text if is_first else f"{self.stop}, then {text}")

    @contextmanager
    def hold_stops(self) -> Iterator[None]:
        """Record the first signal to stop in `stop` during the body, without raising."""
        self._is_held = True
        try:
            yield
        finally:
            self._is_held = False

    @contextmanager
    def allow_interrupts(self) -> Iterator[None]:
        """Raise Interrupted for signals to stop during the body despite `hold_stops`.

        A signal that has arrived before is raised at once.
        """
        was_held = self._is_held
        self._is_held = False
        try:
            self.check()
            yield
        finally:
            self._is_held = was_held

    def check(self) -> None:
        """Raise Interrupted if a signal to stop has arrived, even if it was raised before."""
        if self.stop is not None:
            self._has_interrupted = True
            raise Interrupted(self.stop)


@contextmanager
def handle_signals(signals: Signals) -> Iterator[None]:
    """Let `signals` handle the signals of this process during the body.

    Has no effect outside the main thread, since Python delivers signals to the main thread.
    """
    previous_handlers = {}
    with suppress(ValueError):
        for number in (*find_stops(), SAVE):
            previous_handlers[number] = signal.signal(number, signals.handle)
    try:
        yield
    finally:
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def find_stops() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process, without SIGHUP if `nohup` ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP if number != signal.SIGHUP or not is_ignored)


def interrupt_command(output: str = "") -> None:
    """Make signals to stop act like Ctrl-C and ignore SIGUSR1, before and after a run.

    Otherwise SIGUSR1 would kill a process that is importing, or has just written its summary. A
    process that is interrupted while it imports ends at once, and prints `output` on stdout.
    """
    with suppress(ValueError):
        for number in find_stops():
            signal.signal(number, partial(_interrupt, output.encode()))
        signal.signal(SAVE, signal.SIG_IGN)


def end_on_signal(status: int) -> None:
    """End the process with `status` at a signal to stop, since the command is already done."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(status)

    with suppress(ValueError):
        for number in find_stops():
            signal.signal(number, end)


def is_importing(frame: FrameType | None) -> bool:
    """Return whether a module is being imported in a frame or one of its callers.

    C++ modules treat an exception raised during their import as a failure; some abort the process.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _interrupt(output: bytes, number: int, frame: FrameType | None) -> None:
    if is_importing(frame):
        # Nothing that must be closed has been started yet.
        os.write(sys.stderr.fileno(), b"interrupted\n")
        with suppress(OSError):
            os.write(1, output)
        os._exit(os.EX_TEMPFAIL)
    raise KeyboardInterrupt
