"""Signals: SIGTERM, SIGINT and SIGHUP stop a run, SIGUSR1 makes it save a checkpoint and continue.

The first signal to stop is recorded. Training stops after the current dispatch: steps are saved, an
evaluation is abandoned. A second one, unless it is SIGHUP, which both the shell and the system send
when a terminal closes, ends the run at once. Later signals are ignored.

In a command that trains (`watch_signals`) a thread answers signals, and nothing is raised in
whatever the main thread is doing: C code may turn an exception into another one, or lose it.
Outside of training the main thread has `GRACE_S` to notice the first signal (`check`). Then, or at
a second signal, the thread calls the endings of the run and ends the process. In a process that
uses the package as a library, signals outside of training and second signals raise Interrupted.
"""

from __future__ import annotations

import os
import select
import signal
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from functools import partial
from types import FrameType, TracebackType

from pipeline.core.errors import PipelineError

STOP = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)
"""Signals that stop a run. SIGHUP is sent when the terminal or its connection is closed."""
SAVE = signal.SIGUSR1
GRACE_S = 1.0
"""Seconds after a first signal outside of training, in which the main thread may notice it."""
END_S = 600.0
"""Most seconds that endings take, such as the write of a checkpoint."""


class Interrupted(KeyboardInterrupt):
    """A signal has stopped a run. The message has the signal's name."""


def replace_interrupt_traceback() -> None:
    """Make Python print one line for an Interrupted that ends the process, in place of a traceback.

    The exit status is unchanged. Other exceptions are shown as before.
    """
    show_others = sys.excepthook
    if getattr(show_others, "shows_interrupts", False):
        return

    def show(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        if issubclass(kind, Interrupted):
            print(f"interrupted: {error}", file=sys.stderr)
        else:
            show_others(kind, error, trace)

    show.shows_interrupts = True  # type: ignore[attr-defined]
    sys.excepthook = show


class Signals:
    """The requests that a run has received by signals."""

    def __init__(self) -> None:
        self.stop: str | None = None
        """Text about the first signal to stop, such as `SIGTERM received`."""
        self.saves = 0
        """Number of signals that requested a checkpoint."""
        self._again: str | None = None
        self.is_held = False
        """Whether the run looks at `stop` itself, so that a first signal raises nothing."""
        self.is_raised = False
        """Whether Interrupted has been raised, so that the run is ending."""
        self.allows_interrupts = False
        """Whether the body of `allow_interrupts` runs."""

    def note(self, number: int) -> bool:
        """Record a signal to stop. Return whether it is another one than the first."""
        is_first = self.stop is None
        name = signal.Signals(number).name
        if not is_first and number != signal.SIGHUP and self._again is None:
            self._again = f"{self.stop}, then {name} received"
        self.stop = self.stop or f"{name} received"
        return not is_first and number != signal.SIGHUP

    @property
    def reason(self) -> str | None:
        """Text about all signals to stop that had an effect."""
        return self._again or self.stop

    def handle(self, number: int, frame: FrameType | None) -> None:
        """Handle a signal. If no thread watches signals, this raises Interrupted, at most once,
        for a signal to stop that isn't held by `hold_stops` or is the second one. While a module is
        imported, it isn't raised."""
        if number == SAVE:
            self.saves += 1
            return
        if _WATCHES and not self.allows_interrupts:
            return
        if number == signal.SIGHUP and self.stop is not None:
            return
        is_again = self.note(number)
        can_wait = (not is_again and self.is_held) or is_importing(frame)
        if not self.is_raised and not can_wait:
            self.is_raised = True
            raise Interrupted(self.reason)

    @contextmanager
    def hold_stops(self) -> Iterator[None]:
        """Record the first signal to stop in `stop` during the body, without raising."""
        self.is_held = True
        try:
            yield
        finally:
            self.is_held = False

    @contextmanager
    def allow_interrupts(self) -> Iterator[None]:
        """Raise Interrupted for signals to stop during the body despite `hold_stops`.

        A signal that has arrived before is raised at once.
        """
        was_held = self.is_held
        self.is_held = False
        self.allows_interrupts = True
        try:
            self.check()
            yield
        finally:
            self.allows_interrupts = False
            self.is_held = was_held

    def recognise(self, error: BaseException) -> BaseException:
        """Return Interrupted for an error that C code made of it, else the error."""
        is_foreign = isinstance(error, Exception) and not isinstance(error, PipelineError)
        return Interrupted(self.reason) if self.is_raised and is_foreign else error

    def check(self) -> None:
        """Raise Interrupted if a signal to stop has arrived, even if it was raised before."""
        if self.stop is not None:
            self.is_raised = True
            raise Interrupted(self.reason)


class _Watch:
    """A thread that answers the signals to stop of this process."""

    def __init__(self) -> None:
        self.runs: list[Signals] = []
        """Signals of the runs that are open in the main thread."""
        self.endings: list[Callable[[], object]] = []
        """Called at the end of the process, the last one first."""
        self._concluding = threading.Lock()
        self._output, self._input = os.pipe()
        for end in (self._output, self._input):
            os.set_blocking(end, False)
        # Written by Python's handler in C, also while the main thread is in C code.
        self._previous = signal.set_wakeup_fd(self._input, warn_on_full_buffer=False)
        self._thread = threading.Thread(target=self._work, name="signals", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Stop answering signals, and end the thread. The main thread calls it."""
        signal.set_wakeup_fd(self._previous)
        os.close(self._input)
        self._thread.join()
        os.close(self._output)

    @contextmanager
    def conclude(self) -> Iterator[None]:
        """Keep the thread from ending the process during the body, which takes a moment."""
        with self._concluding:
            yield

    def _work(self) -> None:
        deadline_s = None
        while True:
            left_s = None if deadline_s is None else max(0.0, deadline_s - time.monotonic())
            if select.select([self._output], [], [], left_s)[0]:
                received = os.read(self._output, 4096)
                if not received:
                    return
                for number in filter(STOP.__contains__, received):
                    # A copy, since the main thread may close the run meanwhile.
                    runs = self.runs[-1:]
                    if not any(run.allows_interrupts or not run.note(number) for run in runs):
                        self._end()
                    elif deadline_s is None and not runs[0].is_held:
                        deadline_s = time.monotonic() + GRACE_S
            elif deadline_s is not None:
                deadline_s = None
                # With other states, the main thread has noticed the signal, or will.
                if not any(run.is_held or run.is_raised for run in self.runs[-1:]):
                    self._end()

    def _end(self) -> None:
        """Call the endings and end the process."""
        thread = threading.Thread(target=self._call_endings, daemon=True)
        thread.start()
        thread.join(END_S)
        os._exit(os.EX_TEMPFAIL)

    def _call_endings(self) -> None:
        self._concluding.acquire()  # for ever: the process ends
        if not self.endings:
            with suppress(OSError):
                os.write(2, b"interrupted\n")
        for ending in reversed(self.endings):
            with suppress(Exception):
                ending()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()


_WATCHES: list[_Watch] = []
"""The watch of this process, if there is one."""
_COMMANDS: list[bool] = []
"""Whether the current command, if there is one, was interrupted."""


@contextmanager
def watch_signals() -> Iterator[None]:
    """During the body, let a thread answer the signals to stop of this process.

    Has no effect outside the main thread, since Python delivers signals to the main thread, and in
    a process that isn't a command's, such as a notebook: the thread would end it.
    """
    is_main = threading.current_thread() is threading.main_thread()
    if _WATCHES or not is_main or not _is_command():
        yield
        return
    _WATCHES.append(_Watch())
    try:
        yield
    finally:
        _WATCHES.pop().close()


@contextmanager
def end_with(ending: Callable[[], object]) -> Iterator[None]:
    """Call `ending` if a signal ends the process during the body. Its errors are ignored."""
    watches = list(_WATCHES)
    for watch in watches:
        watch.endings.append(ending)
    try:
        yield
    finally:
        for watch in watches:
            watch.endings.remove(ending)


@contextmanager
def conclude() -> Iterator[None]:
    """Keep signals from ending the process during the body, which takes a moment."""
    if not _WATCHES:
        yield
        return
    with _WATCHES[0].conclude():
        yield


@contextmanager
def handle_signals(signals: Signals) -> Iterator[None]:
    """Let `signals` handle the signals of this process during the body.

    Has no effect outside the main thread, since Python delivers signals to the main thread.
    """
    previous_handlers = {}
    with suppress(ValueError):
        for number in (*find_stops(), SAVE):
            previous_handlers[number] = signal.signal(number, signals.handle)
    watches = _WATCHES[:1] if previous_handlers else []
    for watch in watches:
        watch.runs.append(signals)
    try:
        yield
    finally:
        for watch in watches:
            watch.runs.pop()
        for number, handler in previous_handlers.items():
            signal.signal(number, handler)


def find_stops() -> tuple[signal.Signals, ...]:
    """Return the signals that stop this process, without SIGHUP if `nohup` ignores it."""
    is_ignored = signal.getsignal(signal.SIGHUP) == signal.SIG_IGN
    return tuple(number for number in STOP if number != signal.SIGHUP or not is_ignored)


def interrupt_command(output: str = "") -> None:
    """Make signals to stop end the process, and ignore SIGUSR1, before and after a run.

    Otherwise SIGUSR1 would kill a process that is importing, or has just written its summary. The
    process prints `output` on stdout. In the body of `raise_interrupts` signals act like Ctrl-C.
    """
    with suppress(ValueError):
        for number in find_stops():
            signal.signal(number, partial(_interrupt, output.encode()))
        signal.signal(SAVE, signal.SIG_IGN)


def replace_interrupt_output(output: str = "") -> None:
    """Print `output` on stdout if a signal ends the process.

    Has no effect in a process that isn't a command's, whose signals `interrupt_command` leaves
    alone.
    """
    if _is_command():
        interrupt_command(output)


def _is_command() -> bool:
    """Return whether `interrupt_command` handles the signals of this process."""
    handler = signal.getsignal(signal.SIGTERM)
    return isinstance(handler, partial) and handler.func is _interrupt


@contextmanager
def raise_interrupts() -> Iterator[None]:
    """Raise KeyboardInterrupt for signals to stop during the body, so that it can clean up.

    An error that C code made of it is replaced by KeyboardInterrupt again.
    """
    _COMMANDS.append(False)
    try:
        yield
    except Exception as error:
        if _COMMANDS[-1] and not isinstance(error, PipelineError):
            raise KeyboardInterrupt from error
        raise
    finally:
        _COMMANDS.pop()


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
    if _WATCHES:
        return
    if not _COMMANDS or is_importing(frame):
        # Nothing that must be closed has been started yet.
        for descriptor, text in ((2, b"interrupted\n"), (1, output)):
            with suppress(OSError):
                os.write(descriptor, text)
        os._exit(os.EX_TEMPFAIL)
    _COMMANDS[-1] = True
    raise KeyboardInterrupt
