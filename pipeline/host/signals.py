"""Signals: SIGTERM, SIGINT and SIGHUP stop a run, SIGUSR1 has it save and go on.

While steps are trained, a signal to stop is only noted: training answers it behind the dispatch
that is under way, of steps, which are saved, or of an evaluation, which is given up. Anywhere else
nothing would be lost, and it interrupts. A second one interrupts everywhere, unless it is SIGHUP:
where a terminal is closed the shell sends one and the system another, and nobody is insisting. What
comes later finds a run that is ending, and is left alone.
"""

from __future__ import annotations

import os
import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from types import FrameType

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""SIGHUP comes when the terminal is closed, or the connection to it is lost."""
SAVE = signal.SIGUSR1


class Interrupted(KeyboardInterrupt):
    """A signal ends a run where it stands; the text says which."""


class Signals:
    """What a run was asked for by signals."""

    def __init__(self) -> None:
        self.stop: str | None = None
        """The first signal that asked to stop, in words."""
        self.saves = 0
        """How many signals asked for a checkpoint."""
        self._held = self._interrupted = False

    def note(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. Raises Interrupted unless it can wait, or the run is ending already."""
        if number == SAVE:
            self.saves += 1
            return
        if number == signal.SIGHUP and self.stop is not None:
            return
        said = f"{signal.Signals(number).name} received"
        first, self.stop = self.stop is None, self.stop or said
        waits = (first and self._held) or is_importing(frame)
        if not self._interrupted and not waits:
            self._interrupted = True
            raise Interrupted(said if first else f"{self.stop}, then {said}")

    @contextmanager
    def held(self) -> Iterator[None]:
        """Inside, the first signal to stop is noted for whoever looks at `stop`."""
        self._held = True
        try:
            yield
        finally:
            self._held = False

    def check(self) -> None:
        """Raise Interrupted if a signal to stop was noted, or raised where nobody let it pass."""
        if self.stop is not None:
            self._interrupted = True
            raise Interrupted(self.stop)


@contextmanager
def heard(signals: Signals) -> Iterator[None]:
    """Inside, `signals` notes what this process receives; nothing outside the main thread, where
    Python delivers none."""
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
    """The signals that stop this process: not SIGHUP where it is ignored, as `nohup` has it."""
    ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP if number != signal.SIGHUP or not ignored)


def interrupt_command() -> None:
    """Until a run listens: what stops one ends this process as Ctrl-C does, and SIGUSR1 has
    nothing to save.

    Without it SIGUSR1 would end a process that is still importing, or has just written its summary.
    """
    with suppress(ValueError):
        for number in find_stops():
            signal.signal(number, _interrupt)
        signal.signal(SAVE, signal.SIG_IGN)


def is_importing(frame: FrameType | None) -> bool:
    """Whether a module is being imported in a frame or one of those that called it.

    Modules written in C++ take what is raised there for a failure, and some end the process.
    """
    while frame is not None:
        if frame.f_code.co_filename.startswith("<frozen importlib"):
            return True
        frame = frame.f_back
    return False


def _interrupt(number: int, frame: FrameType | None) -> None:
    if is_importing(frame):
        # Nothing has been begun that would have to be ended.
        os.write(sys.stderr.fileno(), b"interrupted\n")
        os._exit(1)
    raise KeyboardInterrupt
