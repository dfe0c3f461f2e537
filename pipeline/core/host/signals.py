"""Signals: SIGTERM, SIGINT and SIGHUP stop a run, SIGUSR1 makes it save a checkpoint and continue.

During training, a signal to stop is only noted: training handles it after the current dispatch, of
steps, which are saved, or of an evaluation, which is abandoned. Elsewhere nothing would be lost,
and the signal interrupts. A second one interrupts everywhere, unless it is SIGHUP: when a terminal
closes, the shell sends one and the system another. Later signals find a run that is already ending,
and are ignored.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run; SIGHUP is sent when the terminal or its connection is closed."""
SAVE = signal.SIGUSR1


class Interrupted(KeyboardInterrupt):
    """A signal that interrupts a run immediately; the message names it."""


class Signals:
    """The requests that a run has received by signals."""

    def __init__(self) -> None:
        self.stop: str | None = None
        """The first signal to stop, as text."""
        self.saves = 0
        """Number of signals that requested a checkpoint."""
        self._held = self._interrupted = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Raises Interrupted unless it can wait, or the run is already ending."""
        if number == SAVE:
            self.saves += 1
            return
        if number == signal.SIGHUP and self.stop is not None:
            return
        text = f"{signal.Signals(number).name} received"
        first = self.stop is None
        self.stop = self.stop or text
        waits = (first and self._held) or is_importing(frame)
        if not self._interrupted and not waits:
            self._interrupted = True
            raise Interrupted(text if first else f"{self.stop}, then {text}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the first signal to stop is only noted, in `stop`."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    @contextmanager
    def interruptible(self) -> Iterator[None]:
        """Inside `held`, a signal to stop interrupts; at once, if one was noted before."""
        held = self._held
        self._held = False
        try:
            self.check()
            yield
        finally:
            self._held = held

    def check(self) -> None:
        """Raise Interrupted if a signal to stop was noted, or its exception was swallowed."""
        if self.stop is not None:
            self._interrupted = True
            raise Interrupted(self.stop)


@contextmanager
def heard(signals: Signals) -> Iterator[None]:
    """Inside, `signals` handles the signals of this process.

    Has no effect outside the main thread, where Python delivers none.
    """
    previous = {}
    with suppress(ValueError):
        for number in (*find_stops(), SAVE):
            previous[number] = signal.signal(number, signals.note)
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def find_stops() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process; without SIGHUP if it is ignored, as under
    `nohup`."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP if number != signal.SIGHUP or not ignored)


def interrupt_command() -> None:
    """Handle signals until a run does: those to stop act like Ctrl-C, and SIGUSR1 is ignored.

    Otherwise SIGUSR1 would kill a process that is still importing, or has just written its summary.
    """
    with suppress(ValueError):
        for number in find_stops():
            signal.signal(number, _interrupt)
        signal.signal(SAVE, signal.SIG_IGN)


def end_on_signal(status: int) -> None:
    """Let a signal to stop end the process at once: the command has ended, with this status."""

    def end(number: int, frame: FrameType | None) -> None:
        os._exit(status)

    with suppress(ValueError):
        for number in find_stops():
            signal.signal(number, end)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in a frame or one of its callers.

    C++ modules treat an exception raised during their import as a failure; some abort the process.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    if is_importing(frame):
        # Nothing has been started that would need an orderly end.
        os.write(sys.stderr.fileno(), b"interrupted\n")
        os._exit(1)
    raise KeyboardInterrupt
