"""Monitors that call other monitors: on another thread, or only until one fails."""

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
"""Time between two batches of calls, so that many steps are written at once."""
LIMIT_BYTES = 64 << 20
"""Queued bytes above which training waits."""
CALL_BYTES = 1 << 10
"""Upper bound of the bytes of a queued call, without its telemetry."""
T = TypeVar("T")
M = TypeVar("M", bound=Monitor)


class BackgroundMonitor(MonitorRelay):
    """Passes every event on to other monitors, in the same order, on another thread.

    The monitors are flushed after each batch of queued calls. After an error of a monitor no more
    calls are made, and the next method that the caller uses raises the error.
    """

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._queued_bytes = 0
        self._num_queued = 0
        self._num_done = 0
        self._is_urgent = False
        self._is_closing = False
        self._failure: BaseException | None = None
        self._has_raised = False
        self._thread = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._thread.start()

    def relay(self, event: Callable[[Any], None], size_bytes: int = 0) -> None:
        self.submit(partial(self._call_monitors, event), size_bytes)

    def submit(self, call: Callable[[], None], size_bytes: int = 0) -> None:
        """Queue a call, with arrays of `size_bytes`; the thread makes it after the calls before."""
        self._raise_failure()
        with self._changed:
            self._calls.append(call)
            self._num_queued += 1
            self._queued_bytes += CALL_BYTES + size_bytes
            is_full = self._queued_bytes > LIMIT_BYTES
        if is_full:
            self.flush()

    def submit_and_wait(self, call: Callable[[], T]) -> T:
        """Queue a call, wait until the thread has made it, and return its result."""
        results: list[T] = []
        self.submit(lambda: results.append(call()))
        self.flush()
        return results[0]

    def flush(self) -> None:
        """Wait until every queued call is made and every monitor is flushed."""
        with self._changed:
            num_queued = self._num_queued
            self._is_urgent = True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._num_done >= num_queued)
        self._raise_failure()

    def close(self) -> None:
        """Make the queued calls, close every monitor and end the thread."""
        with self._changed:
            self._is_closing = self._is_urgent = True
            self._changed.notify_all()
        self._thread.join()
        if not self._has_raised:
            self._raise_failure()

    def _raise_failure(self) -> None:
        if self._failure is not None:
            self._has_raised = True
            raise self._failure

    def _call_monitors(self, event: Callable[[Monitor], None]) -> None:
        for monitor in self.monitors:
            event(monitor)

    def _work(self) -> None:
        """Make the queued calls in batches until the monitor closes."""
        is_closing = False
        while not is_closing:
            with self._changed:
                self._changed.wait_for(lambda: self._is_urgent, PERIOD_S)
                calls = self._calls
                self._calls = []
                self._queued_bytes = 0
                is_closing = self._is_closing
                self._is_urgent = False
            num_calls = len(calls)
            if calls:
                calls.append(partial(self._call_monitors, lambda monitor: monitor.flush()))
            for call in calls:
                if self._failure is None:
                    self._attempt(call)
            with self._changed:
                self._num_done += num_calls
                self._changed.notify_all()
        for monitor in self.monitors:
            self._attempt(monitor.close)

    def _attempt(self, call: Callable[[], None]) -> None:
        """Make a call, and store the first error, of any kind, for the caller of the monitor."""
        try:
            call()
        except BaseException as error:
            if self._failure is None:
                self._failure = error


@dataclass
class BestEffortMonitor(MonitorRelay, Generic[M]):
    """Passes every event on to a monitor until it fails; then warns, and continues without it.

    `what` is the monitor's name in the warning.
    """

    monitor: M | None
    what: str
    warn: Callable[[str], None]

    def flush(self) -> None:
        self.relay(lambda monitor: monitor.flush())

    def close(self) -> None:
        self.relay(lambda monitor: monitor.close())

    def relay(self, event: Callable[[M], None], size_bytes: int = 0) -> None:
        """Call `event(monitor)`, unless the monitor has failed before."""
        monitor = self.monitor
        if monitor is None:
            return
        try:
            event(monitor)
        except Exception as error:  # any error: it must not end training
            self.monitor = None
            with suppress(Exception):
                monitor.close()
            is_plain = isinstance(error, PipelineError)
            reason = str(error) if is_plain else f"{type(error).__name__}: {error}"
            self.warn(f"{self.what} failed and has ended; training continues: {reason}")
