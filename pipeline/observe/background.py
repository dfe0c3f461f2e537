"""Monitors on a thread of their own: training tells them and goes on."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

from pipeline.observe.monitors import Evaluation, Monitor, SinkReport
from pipeline.sink.telemetry import Telemetry

PERIOD_S = 0.1
"""How often what was told is passed on. Seldom, so that many steps are written at once and the
threads do not take turns at every step."""
LIMIT_BYTES = 64 << 20
"""How much may wait before training does."""
T = TypeVar("T")
CALL_BYTES = 1 << 10
"""What a call takes besides its telemetry, generously."""


class BackgroundMonitor:
    """A monitor that tells others what it is told, in the same order, on another thread.

    They are flushed whenever they have been told all there is. When one of them raises, nobody is
    told anything more, and the error is raised here: by the next call, `close` at the latest.
    """

    def __init__(self, monitors: Iterable[Monitor]) -> None:
        self.monitors = tuple(monitors)
        self._changed = threading.Condition()
        self._calls: list[Callable[[], None]] = []
        self._bytes = 0
        self._told, self._done = 0, 0
        self._urgent, self._closing = False, False
        self._failure: BaseException | None = None
        self._raised = False
        self._thread = threading.Thread(target=self._work, name="monitors", daemon=True)
        self._thread.start()

    def on_steps(self, telemetry: Telemetry, seconds: float) -> None:
        """Pass on that steps were done."""
        tell = partial(self._each, "on_steps", telemetry, seconds)
        self._tell(tell, telemetry.nbytes)

    def on_sink(self, report: SinkReport) -> None:
        """Pass on that a sink ended."""
        self._tell(partial(self._each, "on_sink", report))

    def on_eval(self, step: int, evaluation: Evaluation) -> None:
        """Pass on an evaluation."""
        self._tell(partial(self._each, "on_eval", step, evaluation))

    def on_rollback(self, step: int, to: int) -> None:
        """Pass on a rollback."""
        self._tell(partial(self._each, "on_rollback", step, to))

    def tell(self, call: Callable[..., None], *args: Any) -> None:
        """Have something else done, in its turn."""
        self._tell(partial(call, *args))

    def ask(self, call: Callable[..., T], *args: Any) -> T:
        """Have something done in its turn, on the thread, and return what came of it."""
        answers: list[T] = []
        self._tell(lambda: answers.append(call(*args)))
        self.flush()
        return answers[0]

    def flush(self) -> None:
        """Wait until everyone has been told everything, and flushed it."""
        with self._changed:
            told, self._urgent = self._told, True
            self._changed.notify_all()
            self._changed.wait_for(lambda: self._done >= told)
        self._raise()

    def close(self) -> None:
        """Tell what is left, close everyone and end the thread."""
        with self._changed:
            self._closing = self._urgent = True
            self._changed.notify_all()
        self._thread.join()
        if not self._raised:
            self._raise()

    def _tell(self, call: Callable[[], None], size: int = 0) -> None:
        self._raise()
        with self._changed:
            self._calls.append(call)
            self._told += 1
            self._bytes += CALL_BYTES + size
            full = self._bytes > LIMIT_BYTES
        if full:
            self.flush()

    def _raise(self) -> None:
        if self._failure is not None:
            self._raised = True
            raise self._failure

    def _each(self, event: str, *args: Any) -> None:
        for monitor in self.monitors:
            getattr(monitor, event)(*args)

    def _work(self) -> None:
        closing = False
        while not closing:
            with self._changed:
                self._changed.wait_for(lambda: self._urgent, PERIOD_S)
                calls, self._calls, self._bytes = self._calls, [], 0
                closing, self._urgent = self._closing, False
            self._pass_on(calls)
            with self._changed:
                self._done += len(calls)
                self._changed.notify_all()
        for monitor in self.monitors:
            self._guard(monitor.close)

    def _pass_on(self, calls: list[Callable[[], None]]) -> None:
        if calls:
            calls = [*calls, partial(self._each, "flush")]
        for call in calls:
            if self._failure is None:
                self._guard(call)

    def _guard(self, call: Callable[[], None]) -> None:
        """Keep the first error for whoever calls next; also what would end the process."""
        try:
            call()
        except BaseException as error:
            if self._failure is None:
                self._failure = error
