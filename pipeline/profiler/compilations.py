"""Compilations while a run trains: JAX's own events, with the shapes that were new."""

from __future__ import annotations

import logging
import re
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import jax

COMPILES = "/jax/core/compile/"
"""Prefix of JAX's events: tracing, lowering and compiling."""
EVENT = "/jax/core/compile/backend_compile_duration"
"""The last one of a program, which has its name."""
LOGGER = "jax._src.interpreters.pxla"
_COMPILING = re.compile(r"Compiling (\S+) with global shapes and types (.*?)\. Argument mapping")


@dataclass(frozen=True)
class Compilation:
    """A program that was compiled: its name, when that ended by `perf_counter`, how long tracing,
    lowering and compiling took, and the shapes of its arguments where they are known."""

    name: str
    ended_s: float
    seconds: float
    shapes: str = ""


class Compilations(logging.Handler):
    """The compilations while it is open."""

    def __init__(self) -> None:
        super().__init__(logging.DEBUG)
        self.found: list[Compilation] = []
        self._shapes: dict[str, str] = {}
        self._before_s = 0.0

    def emit(self, record: logging.LogRecord) -> None:
        """Keep the shapes of a line that JAX logs before it compiles."""
        if line := _COMPILING.match(record.getMessage()):
            self._shapes[line[1]] = line[2]

    def note(self, event: str, duration_secs: float, **kwargs: str | int) -> None:
        """Keep a compilation."""
        if event.startswith(COMPILES) and event != EVENT:
            # Functions that are traced inside of others are counted with them: the longest counts.
            self._before_s = max(self._before_s, duration_secs)
        if event == EVENT:
            seconds, self._before_s = duration_secs + self._before_s, 0.0
            name = str(kwargs.get("fun_name", ""))
            shapes = self._shapes.get(name, "")
            self.found.append(Compilation(name, time.perf_counter(), seconds, shapes))


@contextmanager
def watch_compilations() -> Iterator[Compilations]:
    """Yield the compilations of the body, from its begin."""
    watch, logger = Compilations(), logging.getLogger(LOGGER)
    level, propagates = logger.level, logger.propagate
    jax.monitoring.register_event_duration_secs_listener(watch.note)
    logger.addHandler(watch)
    # The lines are for this handler alone.
    logger.setLevel(logging.DEBUG)
    logger.propagate = False
    try:
        yield watch
    finally:
        logger.removeHandler(watch)
        logger.setLevel(level)
        logger.propagate = propagates
        jax.monitoring.unregister_event_duration_listener(watch.note)
