"""Compilations while a run trains, from JAX's events and log lines."""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

from pipeline.core.host.jax_private import COMPILE_LOGGER
from pipeline.engine.monitors.log_levels import handle_messages

EVENT_PREFIX = "/jax/core/compile/"
"""Prefix of JAX's events for tracing, lowering and compiling."""
LAST_EVENT = "/jax/core/compile/backend_compile_duration"
"""The last event of a compilation, which has the program's name."""
MAX_GAP_S = 0.01
"""Longest time between the end of an event and the begin of the next one of the same program."""
_COMPILING = re.compile(r"Compiling (\S+) with global shapes and types (.*?)\. Argument mapping")


@dataclass(frozen=True)
class Compilation:
    """One compilation of a program."""

    name: str
    ended_s: float
    """End of the compilation, by `time.perf_counter`."""
    seconds: float
    """Duration of tracing, lowering and compiling."""
    shapes: str = ""
    """Shapes of the arguments; "" if they are unknown."""


class Compilations(logging.Handler):
    """Handler that records compilations from JAX's events and log lines."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.compilations: list[Compilation] = []
        self._shapes: dict[str, str] = {}
        self._began_s = self._last_event_s = -math.inf

    def emit(self, record: logging.LogRecord) -> None:
        """Record the shapes in a line that JAX logs before a compilation."""
        if line := _COMPILING.match(record.getMessage()):
            self._shapes[line[1]] = line[2]

    def record_event(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Record a compilation when its last event arrives."""
        if not event.startswith(EVENT_PREFIX):
            return
        ended_s = time.perf_counter()
        began_s = ended_s - duration_secs
        # After a longer gap, the earlier events are of another program. Events of nested functions
        # end before those that contain them, so the earliest begin counts.
        is_same_program = began_s - self._last_event_s < MAX_GAP_S
        self._began_s = min(self._began_s, began_s) if is_same_program else began_s
        self._last_event_s = ended_s
        if event == LAST_EVENT:
            seconds = ended_s - self._began_s
            self._last_event_s = -math.inf
            name = str(kwargs.get("fun_name", ""))
            shapes = self._shapes.get(name, "")
            self.compilations.append(Compilation(name, ended_s, seconds, shapes))


@contextmanager
def watch_compilations() -> Iterator[Compilations]:
    """Record the compilations in the body of a `with` statement."""
    watch = Compilations()
    jax.monitoring.register_event_duration_secs_listener(watch.record_event)
    try:
        with handle_messages(COMPILE_LOGGER, watch, logging.DEBUG):
            yield watch
    finally:
        jax.monitoring.unregister_event_duration_listener(watch.record_event)
