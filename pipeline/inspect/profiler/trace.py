"""Trace of JAX's profiler, and its operations divided among iterations of the training loop.

A trace has every operation that a device ran, with its begin and end.
"""

from __future__ import annotations

import bisect
import re
import tempfile
import warnings
from collections import Counter, defaultdict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, Literal

import jax

from pipeline.backends.graph.hlo_program import (
    CONTAINERS,
    CONVERSION_KIND,
    HloInstruction,
    HloProgram,
)
from pipeline.core.errors import RunError, first_line
from pipeline.models.modules.name_stack import DATA, UPDATE, find_layer

DEVICE = "/device:"
"""Prefix of the planes of all devices except the host's processor."""
StepPhase = Literal["data", "forward", "backward", "update", "other"]
PHASES: tuple[StepPhase, ...] = ("data", "forward", "backward", "update", "other")
UNKNOWN = HloInstruction("unknown", frozenset({"unknown"}), 0)
COPIES = "(moves)"
"""Name of the layer for copies that the compiler added, which have no scope."""
_CONTROL = re.compile(r"cond|while|body|closed_call|scan|branch_\d+_fun")
"""Parts of a scope that JAX's loops and branches add."""


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


@dataclass(frozen=True)
class Operation:
    """An operation of a step."""

    name: str
    phase: StepPhase
    layer: str
    """Path of its layer; "" outside of the network."""
    kind: str
    instruction: HloInstruction

    @property
    def is_named(self) -> bool:
        """Whether it has a layer, or a phase other than `other`."""
        return bool(self.layer) or self.phase != "other"


@dataclass(frozen=True)
class Iteration:
    """Times of an iteration's points in ns. Their numbers in parentheses are CANN's."""

    begin: float
    """Begin of the first operation."""
    fp_begin: float
    """Begin of the forward pass (1)."""
    bp_end: float
    """End of the backward pass (2)."""
    end: float
    """End of the last operation (6)."""
    reduce_begin: float | None = None
    """Begin of the first all-reduce of gradients (3); None without one."""
    reduce_end: float | None = None
    """End of the last all-reduce of gradients (4)."""


@dataclass(frozen=True)
class IterationTimes:
    """Parts of an iteration in ms, as CANN's documents define them. They add up to `iteration`."""

    iteration: float
    data_tail: float
    fp_bp: float
    update_tail: float


@dataclass(frozen=True)
class OperationTime:
    """Time of an operation, summed over all traced steps."""

    busy_ns: float
    wall_ns: float
    """Its part of the elapsed time; operations that run at once share the time equally."""
    calls: int


@dataclass(frozen=True)
class Traced:
    """The operations of the traced steps, with their times."""

    operations: Mapping[str, Operation]
    times: Mapping[str, OperationTime]
    iterations: tuple[Iteration, ...]
    events: tuple[TracedOp, ...]
    """All operations except containers, such as loops, in the order of their begins."""
    gap_ns: float
    """Time in which no operation ran, from the first begin to the last end."""
    span_ns: float
    """From the first begin to the last end, without evaluations."""


def phase_of(scope: str) -> StepPhase:
    """Return a scope's phase. The update is tested first, since optimizers may differentiate."""
    parts = scope.split("/")
    if UPDATE in parts:
        return "update"
    if DATA in parts:
        return "data"
    if "transpose(" in scope:
        return "backward"
    return "forward" if "jvp(" in scope else "other"


def describe_operation(name: str, module: str, program: HloProgram) -> Operation:
    """Describe an operation of a trace; outside of `program` only its module is known."""
    if program.name and module and module != program.name:
        return Operation(name, "other", "", f"program {module}", UNKNOWN)
    instruction = program.find(name)
    if instruction is None:
        return Operation(name, "other", "" if program.name else module, "unknown", UNKNOWN)
    phase = phase_of(instruction.scope)
    if instruction.is_callback:
        kind = "calls of Python"
    elif instruction.converts and instruction.opcode in ("fusion", "convert"):
        kind = CONVERSION_KIND
    else:
        kind = program.find_kind(name) or instruction.opcode
    layer = _find_layer(instruction.scope) if phase in ("forward", "backward") else ""
    is_copy = phase == "other" and not instruction.scope
    return Operation(name, phase, COPIES if is_copy else layer, kind, instruction)


def _find_layer(scope: str) -> str:
    """Return the path of the layer in a scope, without its primitive and the parts of loops."""
    stack, _, _ = scope.rpartition("/")
    parts = stack.split("/")
    network_depth = next((depth for depth, part in enumerate(parts) if "jvp(" in part), 0)
    names = [part for part in parts[network_depth:] if not _CONTROL.fullmatch(part)]
    return find_layer("/".join(names))


def split_trace(
    events: Sequence[TracedOp],
    program: HloProgram,
    steps: int,
    fp_point: str | None = None,
    bp_point: str | None = None,
) -> Traced:
    """Divide the operations of a trace of `steps` steps among iterations.

    If an operation ran `steps` times, each execution belongs to one step. Other operations, such as
    in a branch, belong to the step in which they began. `fp_point` and `bp_point` name the
    operations at which the forward pass begins and the backward pass ends.
    """
    events, evaluation_begins_ns = _select_training(events, program.name)
    modules = {event.name: event.module for event in events}
    operations = {name: describe_operation(name, modules[name], program) for name in modules}
    # Containers, such as loops, span the operations inside them.
    leaves = tuple(op for op in events if operations[op.name].instruction.opcode not in CONTAINERS)
    by_name: dict[str, list[TracedOp]] = defaultdict(list)
    for event in leaves:
        by_name[event.name].append(event)
    wall_ns, gap_ns, left_out_ns = share_clock(leaves, evaluation_begins_ns)
    times = {
        name: OperationTime(sum(op.ns for op in ops), wall_ns[name], len(ops))
        for name, ops in by_name.items()
    }
    groups = _group_by_iteration(by_name, steps)
    points = (_find_points(group, operations, fp_point, bp_point) for group in groups)
    iterations = tuple(point for point in points if point is not None)
    begin_ns = min((event.begin_ns for event in leaves), default=0.0)
    end_ns = max((event.end_ns for event in leaves), default=0.0)
    span_ns = end_ns - begin_ns - left_out_ns
    return Traced(operations, times, iterations, leaves, gap_ns, span_ns)


def _select_training(
    events: Sequence[TracedOp], module: str
) -> tuple[Sequence[TracedOp], tuple[float, ...]]:
    """Return the events of the training loop, and the begins of evaluations' events, ascending.

    The evaluation's program has a module of the same name. Programs that the host runs between two
    dispatches aren't part of a step. Without a module, in eager mode, every event is returned.
    """
    counts = Counter(event.program for event in events if event.module == module)
    if not module or not counts:
        return events, ()
    training_program = max(counts, key=counts.__getitem__)
    in_module = [event for event in events if event.module == module]
    selected = [event for event in in_module if event.program == training_program]
    begins_ns = [event.begin_ns for event in in_module if event.program != training_program]
    return selected, tuple(sorted(begins_ns))


def share_clock(
    events: Iterable[TracedOp], other_begins_ns: Sequence[float] = ()
) -> tuple[dict[str, float], float, float]:
    """Return the elapsed ns by operation, the ns without an operation, and the ns left out.

    Operations that run at once share the time equally, so that all parts add up to the time from
    the first begin to the last end. A gap in which other work begins, at an instant of the
    ascending `other_begins_ns`, is left out.
    """
    marks: list[tuple[float, int, str]] = []
    for event in events:
        marks += [(event.begin_ns, 1, event.name), (event.end_ns, -1, event.name)]
    # At the same instant, ends come before begins, so that an event of length 0 has no part.
    marks.sort(key=lambda mark: (mark[0], mark[1]))
    active: Counter[str] = Counter()
    running = 0
    gap_ns = 0.0
    left_out_ns = 0.0
    wall_ns: dict[str, float] = {mark[2]: 0.0 for mark in marks}
    last_ns = marks[0][0] if marks else 0.0
    count_begins_before = partial(bisect.bisect_left, other_begins_ns)
    for time_ns, change, name in marks:  # a change of 1 begins, -1 ends
        if time_ns > last_ns:
            elapsed_ns = time_ns - last_ns
            if running:
                for other, count in active.items():
                    wall_ns[other] += elapsed_ns * count / running
            elif count_begins_before(last_ns) < count_begins_before(time_ns):
                left_out_ns += elapsed_ns
            else:
                gap_ns += elapsed_ns
            last_ns = time_ns
        running += change
        active[name] += change
        if not active[name]:
            del active[name]
    return wall_ns, gap_ns, left_out_ns


def _group_by_iteration(
    by_name: Mapping[str, Sequence[TracedOp]], steps: int
) -> list[list[TracedOp]]:
    """Return the operations of each iteration; empty if no operation ran once in every step."""
    regular = {name: ops for name, ops in by_name.items() if len(ops) == steps}
    if not regular:
        return []
    groups = [[ops[step] for ops in regular.values()] for step in range(steps)]
    ends = [max(op.end_ns for op in group) for group in groups]
    for name, ops in by_name.items():
        if name in regular:
            continue
        for event in ops:
            number = bisect.bisect_right(ends, event.begin_ns)
            if number < steps:
                groups[number].append(event)
    return groups


def _find_points(
    group: Sequence[TracedOp],
    operations: Mapping[str, Operation],
    fp_point: str | None,
    bp_point: str | None,
) -> Iteration | None:
    """Return the points of an iteration; None if no operation has a phase."""
    forward = [op for op in group if operations[op.name].phase == "forward"]
    backward = [op for op in group if operations[op.name].phase == "backward"] or forward
    begins = [op for op in group if op.name == fp_point] or forward or backward
    ends = [op for op in group if op.name == bp_point] or backward
    if not begins or not ends:
        return None
    reduces = [op for op in group if "all-reduce" in operations[op.name].instruction.opcode]
    return Iteration(
        begin=min(op.begin_ns for op in group),
        fp_begin=min(op.begin_ns for op in begins),
        bp_end=max(op.end_ns for op in ends),
        end=max(op.end_ns for op in group),
        reduce_begin=min((op.begin_ns for op in reduces), default=None),
        reduce_end=max((op.end_ns for op in reduces), default=None),
    )


def compute_iteration_times(iterations: Sequence[Iteration]) -> tuple[IterationTimes, ...]:
    """Return the parts of each iteration except the first.

    With t(n, p), the time of point p in iteration n:
    - iteration: t(n, 6) - t(n-1, 6)
    - data-augmentation tail: t(n, 1) - t(n-1, 6)
    - forward and backward: t(n, 2) - t(n, 1)
    - aggregation and update tail: t(n, 6) - t(n, 2)
    """
    return tuple(
        IterationTimes(
            (iteration.end - before.end) / 1e6,
            (iteration.fp_begin - before.end) / 1e6,
            (iteration.bp_end - iteration.fp_begin) / 1e6,
            (iteration.end - iteration.bp_end) / 1e6,
        )
        for before, iteration in pairwise(iterations)
    )


def find_median_iteration(times: Sequence[IterationTimes]) -> IterationTimes | None:
    """Return the parts of the iteration of median length; None without an iteration."""
    if not times:
        return None
    return sorted(times, key=lambda parts: parts.iteration)[len(times) // 2]
