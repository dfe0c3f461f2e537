"""Trace of JAX's profiler: every operation that a device ran, with its begin and end."""

from __future__ import annotations

import tempfile
import warnings
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax

from pipeline.core.errors import RunError, first_line

DEVICE = "/device:"
"""Prefix of the planes of all devices except the host's processor."""


@dataclass(frozen=True, slots=True)
class TracedOp:
    """One execution of an operation; `thread` is the number of a host thread or device stream."""

    name: str
    module: str
    thread: int
    begin_ns: float
    end_ns: float
    program: int = 0
    """Number of the compiled program, since modules of two programs may have the same name."""

    @property
    def ns(self) -> float:
        return self.end_ns - self.begin_ns


class Tracer:
    """JAX's profiler for one trace."""

    def __init__(self) -> None:
        self._folder: tempfile.TemporaryDirectory[str] | None = None

    @property
    def is_running(self) -> bool:
        return self._folder is not None

    def start(self) -> None:
        """Start the trace. Raises RunError if another profiler traces this process."""
        options = jax.profiler.ProfileOptions()
        # Events of Python calls would make a step several times longer.
        options.python_tracer_level = 0
        options.host_tracer_level = 1
        options.enable_hlo_proto = False
        folder = tempfile.TemporaryDirectory()
        try:
            jax.profiler.start_trace(folder.name, profiler_options=options)
        except RuntimeError as error:
            folder.cleanup()
            reason = f"{first_line(error)}; end the other profiler"
            raise RunError(f"profile: the profiler can't start: {reason}") from error
        self._folder = folder

    def stop(self) -> bytes:
        """Stop the trace and return the profiler's file, an XSpace; empty if it wrote none."""
        folder = self._folder
        self._folder = None
        assert folder is not None, "the trace must be running"
        with folder:
            jax.profiler.stop_trace()
            files = sorted(Path(folder.name).rglob("*.xplane.pb"))
            return files[0].read_bytes() if files else b""


def read_operations(raw: bytes) -> tuple[TracedOp, ...]:
    """Return the first device's operations in a profiler's file, by begin. Raises ValueError."""
    if not raw:
        return ()
    try:
        planes = list(jax.profiler.ProfileData.from_serialized_xspace(raw).planes)
    except RuntimeError as error:
        raise ValueError(first_line(error)) from error
    device_planes = [plane for plane in planes if plane.name.startswith(DEVICE)]
    # A type of jaxlib 0.12 is made at its first use with a DeprecationWarning. If warnings are
    # errors, the process aborts.
    with warnings.catch_warnings(action="ignore", category=DeprecationWarning):
        traced = _list_operations(device_planes) or _list_operations(planes)
    return tuple(sorted(traced, key=lambda op: (op.begin_ns, op.end_ns)))


def _list_operations(planes: Sequence[Any]) -> list[TracedOp]:
    numbers: set[Any] = set()
    operations: list[tuple[Any, TracedOp]] = []
    lines = (line for plane in planes for line in plane.lines)
    for thread, line in enumerate(lines, start=1):
        for event in line.events:
            stats = dict(event.stats)
            number = stats.get("device_ordinal")
            numbers.add(number)
            if "hlo_op" in stats:
                name = str(stats["hlo_op"])
                module = str(stats.get("hlo_module", ""))
                program = int(stats.get("program_id", 0))
                op = TracedOp(name, module, thread, event.start_ns, event.end_ns, program)
                operations.append((number, op))
    # The number of the first device is above 0 in a later process.
    first = min(numbers - {None}, default=0)
    return [op for number, op in operations if number in (None, first)]
