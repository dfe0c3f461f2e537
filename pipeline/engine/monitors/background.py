"""Monitors that wrap others: on another thread, and until the first failure."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from typing import Any, Generic, TypeVar

from pipeline.core.errors import PipelineError
from pipeline.engine.callbacks.events import Monitor, MonitorRelay

PERIOD_S = 0.1
"""Period at which queued calls are carried out. Long enough that many steps are written at once
and the threads do not alternate at every step."""
LIMIT_BYTES = 64 << 20
"""Bytes that may be queued before training waits."""
CALL_BYTES = 1 << 10
"""Upper bound of the bytes that a queued call takes besides its telemetry."""

T = TypeVar("T")
M = TypeVar("M", bound=Monitor)


class BackgroundMonitor(MonitorRelay):
    """Pass every event on to other monitors, in the same order, on another thread.

    The monitors are flushed after each batch of queued calls. When one of them raises, no further
    call is made, and the next call here raises the error, `close` at the latest.
    """

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._bytes = 0
        self._queued = 0
        self._done = 0
        self._urgent = False
        self._closing = False
        self._failure: BaseException | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._thread.start()

    def relay(self, event: Callable[[Any], None], size_bytes: int = 0) -> None:
        self._queue(partial(self._call_each, event), size_bytes)

    def submit(self, call: Callable[[], None]) -> None:
        """Queue a call that isn't an event; it runs on the thread, after everything before it."""
        self._queue(call)

    def submit_and_wait(self, call: Callable[[], T]) -> T:
        """Queue a call, wait until the thread has carried it out, and return its result."""
        results: list[T] = []
        self._queue(lambda: results.append(call()))
        self.flush()
        return results[0]

    def flush(self) -> None:
        """Wait until every queued call is carried out and every monitor is flushed."""
        with self._changed:
            queued = self._queued
            self._urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= queued)
        self._raise()

    def close(self) -> None:
        """Carry out the queued calls, close every monitor and end the thread."""
        with self._changed:
            self._closing = self._urgent = True
            self._changed.notify_all()
        self._thread.join()
        if not self._raised:
            self._raise()

    def _queue(self, call: Callable[[], None], size_bytes: int = 0) -> None:
        self._raise()
        with self._changed:
            self._calls.append(call)
            self._queued += 1
            self._bytes += CALL_BYTES + size_bytes
            is_full = self._bytes > LIMIT_BYTES
        if is_full:
            self.flush()

    def _raise(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _call_each(self, event: Callable[[Monitor], None]) -> None:
        for monitor in self.monitors:
            event(monitor)

    def _work(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent, PERIOD_S)
                calls = self._calls
                self._calls = []
                self._bytes = 0
                closing = self._closing
                self._urgent = False
            num_calls = len(calls)
            if calls:
                calls.append(partial(self._call_each, lambda monitor: monitor.flush()))
            for call in calls:
                if self._failure is None:
                    self._guard(call)
            with self._changed:
                self._done += num_calls
                self._changed.notify_all()
        for monitor in self.monitors:
            self._guard(monitor.close)

    def _guard(self, call: Callable[[], None]) -> None:
        """Store the first error for the next caller; also one that would end the process."""
        try:
            call()
        except BaseException as error:
            if self._failure is None:
                self._failure = error


@dataclass
class BestEffortMonitor(MonitorRelay, Generic[M]):
    """Pass every event on to a monitor until it fails; then warn, and continue without it.

    `what` is the monitor's name for the user; `warn` is called once, when it fails.
    """

    monitor: M | None
    what: str
    warn: Callable[[str], None]

    def flush(self) -> None:
        self.relay(lambda monitor: monitor.flush())

    def close(self) -> None:
        self.relay(lambda monitor: monitor.close())

    def relay(self, event: Callable[[M], None], size_bytes: int = 0) -> None:
        """Make a call to the monitor, unless it has failed before."""
        monitor = self.monitor
        if monitor is None:
            return
        try:
            event(monitor)
        except Exception as error:  # whatever it is, training is worth more
            self.monitor = None
            with suppress(Exception):
                monitor.close()
            reason = f"{type(error).__name__}: {error}"
            if isinstance(error, PipelineError):
                reason = str(error)
            self.warn(f"{self.what} failed and goes no further; training goes on: {reason}")
