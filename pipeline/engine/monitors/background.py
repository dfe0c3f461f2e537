"""Monitors that call other monitors: on another thread, or only until one fails."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from contextlib import suppress
from dataclasses import dataclass
from functools import partial
from queue import Queue
from typing import Any, Generic, TypeVar

from pipeline.core.errors import PipelineError
from pipeline.engine.callbacks.events import Monitor, MonitorRelay

PERIOD_S = 0.1
"""Time between two batches of calls, so that many steps are written at once."""
LIMIT_BYTES = 64 << 20
"""Bytes of calls since the last flush, above which training waits for a flush."""
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
        self._calls: Queue[Callable[[], None]] = Queue()
        self._unflushed_bytes = 0
        self._is_urgent = threading.Event()
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
        self._calls.put(call)
        self._unflushed_bytes += CALL_BYTES + size_bytes
        if self._unflushed_bytes > LIMIT_BYTES:
            self.flush()

    def submit_and_wait(self, call: Callable[[], T]) -> T:
        """Queue a call, wait until the thread has made it, and return its result."""
        results: list[T] = []
        self.submit(lambda: results.append(call()))
        self.flush()
        return results[0]

    def flush(self) -> None:
        """Wait until every queued call is made and every monitor is flushed."""
        self._unflushed_bytes = 0
        self._is_urgent.set()
        self._calls.join()
        self._raise_failure()

    def close(self) -> None:
        """Make the queued calls, close every monitor and end the thread."""
        self._is_closing = True
        self._is_urgent.set()
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
            self._is_urgent.wait(PERIOD_S)
            self._is_urgent.clear()
            is_closing = self._is_closing
            calls = [self._calls.get() for _ in range(self._calls.qsize())]
            num_calls = len(calls)
            if calls:
                calls.append(partial(self._call_monitors, lambda monitor: monitor.flush()))
            for call in calls:
                if self._failure is None:
                    self._attempt(call)
            for _ in range(num_calls):
                self._calls.task_done()
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
