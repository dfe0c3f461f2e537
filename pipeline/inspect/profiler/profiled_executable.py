"""Observations while a profiled run trains: dispatches, traced steps, compilations.

An executable times its dispatches and traces some of its steps. Compilations are known from JAX's
events and log lines.
"""

from __future__ import annotations

import logging
import math
import re
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import pairwise

import jax

from pipeline.backends.base import Executable, Mechanism, WrappedExecutable
from pipeline.core.host.jax_private import COMPILE_LOGGER
from pipeline.engine.monitors.log_lines import handle_messages
from pipeline.inspect.profiler.trace import TracedOp, Tracer, read_operations
from pipeline.training.metrics import EvalSums
from pipeline.training.state import TrainState
from pipeline.training.telemetry import Telemetry

EVENT_PREFIX = "/jax/core/compile/"
"""Prefix of JAX's events for tracing, lowering and compiling."""
LAST_EVENT = "/jax/core/compile/backend_compile_duration"
"""The last event of a compilation, which has the program's name."""
MAX_GAP_S = 0.01
"""Longest time between the end of an event and the begin of the next one of the same program."""
_COMPILING = re.compile(r"Compiling (\S+) with global shapes and types (.*?)\. Argument mapping")


@dataclass(frozen=True)
class TimedDispatch:
    """One call that ran steps `start + 1 .. stop`; times are by `time.perf_counter`."""

    start: int
    stop: int
    begin_s: float
    end_s: float
    wait_s: float = 0.0
    """Part of the call that waited for data."""
    traced: bool = False
    cpu_s: float = 0.0
    """Processor time of all threads of the process."""

    @property
    def steps(self) -> int:
        return self.stop - self.start

    @property
    def seconds(self) -> float:
        return self.end_s - self.begin_s


class ProfiledExecutable(WrappedExecutable[Executable]):
    """An executable whose steps `first + 1 .. first + steps` are traced.

    A dispatch is split before and after the traced steps. Program, arguments and results are the
    same as without a profile.
    """

    def __init__(
        self, executable: Executable, first: int, steps: int, notify: Callable[[], None]
    ) -> None:
        super().__init__(executable)
        self.first = first
        self.last = first + steps
        self.dispatches: list[TimedDispatch] = []
        self.evaluations_s: list[tuple[float, float]] = []
        """Begin and end of each call of `evaluate`."""
        self.traced: tuple[TracedOp, ...] | None = None
        """Operations of the traced steps; None before they have run."""
        self.raw = b""
        """The profiler's file of the traced steps."""
        self._tracer = Tracer()
        self._notify = notify

    def run(
        self, state: TrainState, start: int, stop: int, mechanism: Mechanism
    ) -> tuple[TrainState, Telemetry]:
        """Run steps `start + 1 .. stop` in up to three parts: before, in and after the trace."""
        all_telemetry: Telemetry | None = None
        bounds = [end for end in (self.first, self.last) if start < end < stop]
        for begin, end in pairwise([start, *bounds, stop]):
            if begin == self.first and self.traced is None and not self._tracer.is_running:
                self._tracer.start()
            traced = self._tracer.is_running
            waited_s = self.loader.waited_s
            cpu_s = time.process_time()
            began = time.perf_counter()
            state, telemetry = super().run(state, begin, end, mechanism)
            ended = time.perf_counter()
            cpu_s = time.process_time() - cpu_s
            waited_s = self.loader.waited_s - waited_s
            self.dispatches.append(TimedDispatch(begin, end, began, ended, waited_s, traced, cpu_s))
            all_telemetry = telemetry if all_telemetry is None else all_telemetry.join(telemetry)
            ends_run = telemetry.non_finite_step is not None
            if self._tracer.is_running and (end >= self.last or ends_run):
                self.end_trace()
            if ends_run:
                break
        assert all_telemetry is not None, "a dispatch has steps"
        return state, all_telemetry

    def evaluate(
        self,
        state: TrainState,
        start: int,
        stop: int,
        before: EvalSums | None = None,
        *,
        on_train: bool = False,
    ) -> EvalSums:
        """Return the sums over evaluation batches, and record the time of the call."""
        began = time.perf_counter()
        sums = super().evaluate(state, start, stop, before, on_train=on_train)
        self.evaluations_s.append((began, time.perf_counter()))
        return sums

    def end_trace(self) -> None:
        """Stop the trace and store its operations, if it is running."""
        if self._tracer.is_running:
            self.raw = self._tracer.stop()
            self.traced = read_operations(self.raw)
            self._notify()


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
