"""The verdict on a step: the first rule that holds, its evidence, and the change that would help.

Rules go from what surrounds a step to what is in it: nothing is gained by faster operators while
the step waits for data. Thresholds were chosen on runs that were made slow (`tests/verdicts.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pipeline.backends.feed.feed_stats import FeedReport
from pipeline.backends.graph.hlo_program import CONVERSIONS
from pipeline.inspect.profiler.compilations import Compilation
from pipeline.inspect.profiler.step_profile import (
    HostTime,
    OperatorTime,
    PredictedChange,
    StepProfile,
    StepVerdict,
)

RECOMPILING = 0.05
"""Share of a step that later compilations take."""
AGAIN = 3
"""Compilations of one function from which its shapes change."""
WAITING = 0.1
CALLING = 0.1
HOST = 0.2
GAINFUL = 1.1
"""Gain of a longer sink from which dispatches limit a run."""
EVENTS = 0.2
CONVERTING = 0.15
MEMORY_SHARE = 0.5
"""Share of the memory's bandwidth from which an operator is limited by it."""
CACHE_BYTES = 8_000_000
"""Bytes up to which a cache may hold all that an operator reads and writes."""
PEAK_SHARE = 0.4
"""Share of the peak from which an operator is limited by computation."""
MOSTLY = 0.5
"""Share of the operators' time that decides between memory and computation."""
ELEMENTWISE = 0.6
"""Share of the operators' time in layers without products from which these limit a step."""
SHOWN = 2
RESIDENT = "train.feed=resident"
PRODUCTS = ("matrix products", "convolutions")


@dataclass(frozen=True)
class SinkGain:
    """The sink that would be fastest, measured with a few steps."""

    size: int
    step_ms: float
    """Predicted milliseconds a step in it."""
    now_ms: float
    """Those in the sinks of the recipe, by the same measurement."""
    error: float = 0.0
    """Relative error of the gain."""

    @property
    def gain(self) -> float:
        """Speed-up by it."""
        return self.now_ms / self.step_ms


@dataclass(frozen=True)
class EventCost:
    """Milliseconds of evaluations and checkpoints by step of the run, and how often they are."""

    ms: float
    count: int


@dataclass(frozen=True)
class Evidence:
    """Everything that rules look at, beside the profile."""

    profile: StepProfile
    host: HostTime
    feed: FeedReport
    sink_steps: int | None
    """Length of the recipe's sinks; None without."""
    callbacks: tuple[str, ...] = ()
    """Callbacks of the recipe by name."""
    compilations: tuple[Compilation, ...] = ()
    """Those during the steps that are timed."""
    compiled_steps: int = 0
    """Timed steps, among which compilations are divided."""
    sink: SinkGain | None = None
    events: EventCost | None = None
    streams_resident: str | None = None
    """The change that puts a streamed split on the device; None if it doesn't fit."""
    precision: str = "O0"

    @property
    def step_ms(self) -> float:
        """Milliseconds of an untraced step, the host's work included."""
        return self.host.step


Rule = Callable[[Evidence], StepVerdict | None]


def decide(evidence: Evidence) -> StepVerdict:
    """Return the verdict of the first rule that holds."""
    for rule in RULES:
        verdict = rule(evidence)
        if verdict is not None:
            return verdict
    raise AssertionError("the last rule always holds")


def _without(evidence: Evidence, ms: float, what: str) -> PredictedChange:
    """The change that a step would be shorter by some milliseconds."""
    left = max(evidence.step_ms - ms, 1e-6)
    return PredictedChange(what, left, evidence.step_ms / left, "counted from the trace")


def _recompiling(evidence: Evidence) -> StepVerdict | None:
    by_name: dict[str, list[Compilation]] = defaultdict(list)
    for compilation in evidence.compilations:
        by_name[compilation.name].append(compilation)
    # Anything that runs for the first time, such as an evaluation, is compiled once or twice.
    by_name = {name: group for name, group in by_name.items() if len(group) >= AGAIN}
    seconds = sum(compilation.seconds for group in by_name.values() for compilation in group)
    ms = 1000 * seconds / evidence.compiled_steps if evidence.compiled_steps else 0.0
    share = min(evidence.host.share(ms), 1.0)
    if share < RECOMPILING:
        return None
    name, group = max(
        by_name.items(), key=lambda item: sum(compilation.seconds for compilation in item[1])
    )
    shapes = list(dict.fromkeys(compilation.shapes for compilation in group if compilation.shapes))
    of_shapes = f", for {' then '.join(shapes[-SHOWN:])}" if len(shapes) > 1 else ""
    why = (
        f"{share:.0%} of a step is compiling after the first dispatch: {name or 'a program'} "
        f"{len(group)} times{of_shapes}"
    )
    return StepVerdict(
        "recompiling", share, why, _without(evidence, ms, "keep its shapes the same")
    )


def _data_bound(evidence: Evidence) -> StepVerdict | None:
    host = evidence.host
    feed = evidence.feed
    share = host.share(host.wait)
    if share <= WAITING:
        return None
    why = f"{share:.0%} of a step, {host.wait:.3g} of {host.step:.3g} ms, waits for data"
    columns = sorted(feed.prepare_ms_per_step.items(), key=lambda item: -item[1])
    if columns:
        why += f"; slowest is {columns[0][0]}, {columns[0][1]:.3g} ms a step to read"
    if feed.slowest_sample is not None:
        why += f" (worst: {feed.slowest_sample})"
    what = evidence.streams_resident or "convert the data once: python -m pipeline convert records"
    severe = "data-bound" if share < 0.25 else "data-bound, severely"
    return StepVerdict(severe, share, why, _without(evidence, host.wait, what))


def _callback_bound(evidence: Evidence) -> StepVerdict | None:
    calls = [call for call in evidence.profile.operators if call.kind == "calls of Python"]
    ms = sum(call.ms for call in calls)
    share = evidence.host.share(ms)
    if share <= CALLING:
        return None
    slowest = max(calls, key=lambda call: call.ms)
    where = f"layer {slowest.layer}" if slowest.layer else f"the {slowest.phase} phase"
    count = sum(call.calls for call in calls)
    why = f"{share:.0%} of a step is {count:g} calls of Python from the program, in {where}"
    what = f"compute {where} in JAX instead of the callback"
    change = _without(evidence, ms, what)
    return StepVerdict("callback-bound", share, why, change, layer=slowest.layer or None)


def _dispatch_bound(evidence: Evidence) -> StepVerdict | None:
    sink = evidence.sink
    if sink is None or sink.gain < max(GAINFUL, 1 + 2 * sink.error):
        return None
    if evidence.sink_steps is not None and sink.size <= evidence.sink_steps:
        # A shorter sink saves no dispatches: the machine was busy.
        return None
    share = 1 - 1 / sink.gain
    now = "no sinks" if evidence.sink_steps is None else f"sinks of {evidence.sink_steps:,}"
    why = f"{share:.0%} of a step of {sink.now_ms:.3g} ms is dispatching {now}"
    what = f"train.sink_size={sink.size}"
    what += " train.sink=true" if evidence.sink_steps is None else ""
    # What callbacks and others take between dispatches is not part of that measurement.
    return StepVerdict(
        "dispatch-bound",
        share,
        why,
        PredictedChange(what, sink.step_ms, sink.gain, "measured here"),
    )


def _host_bound(evidence: Evidence) -> StepVerdict | None:
    host = evidence.host
    share = host.share(host.between)
    if share <= HOST or not evidence.callbacks:
        return None
    named = ", ".join(evidence.callbacks)
    why = f"{share:.0%} of a step is the host between dispatches, with callbacks {named}"
    what = "do less in train.callbacks"
    return StepVerdict("host-bound", share, why, _without(evidence, host.between, what))


def _event_bound(evidence: Evidence) -> StepVerdict | None:
    events = evidence.events
    if events is None:
        return None
    total_ms = evidence.step_ms + events.ms
    share = events.ms / total_ms
    if share <= EVENTS:
        return None
    why = f"{share:.0%} of the run is {events.count:,} evaluations"
    half = evidence.step_ms + events.ms / 2
    what = "evaluate half as often, or half the samples (eval.samples)"
    return StepVerdict(
        "event-bound", share, why, PredictedChange(what, half, total_ms / half, "counted")
    )


def _converting(evidence: Evidence) -> StepVerdict | None:
    conversions = [op for op in evidence.profile.operators if op.kind == CONVERSIONS]
    ms = sum(op.ms for op in conversions)
    share = evidence.host.share(ms)
    if share <= CONVERTING:
        return None
    why = (
        f"{share:.0%} of a step only converts types, {len(conversions)} operators, above all in "
        f"{_places(conversions)}: this device computes products in another type than "
        f"train.precision={evidence.precision}"
    )
    return StepVerdict("converting", share, why, _without(evidence, ms, "train.precision=O0"))


def _bound(resource: Literal["memory", "compute"], evidence: Evidence) -> StepVerdict | None:
    """Whether operators that one resource limits take most of the time."""
    bound = list(_find_limited(evidence, by_memory=resource == "memory"))
    share = _share_of_operators(evidence, bound)
    if share < MOSTLY:
        return None
    peaks = evidence.profile.peaks
    if resource == "memory":
        mean = _mean(bound, "of_bytes")
        roof = f" of {peaks.bytes_per_s / 1e9:.0f} GB/s" if peaks else ""
    else:
        mean = _mean(bound, "of_flops")
        roof = f" of {peaks.flops / 1e9:.0f} GFLOP/s" if peaks else ""
    why = f"{share:.0%} of the operators' time is at {mean:.0%}{roof}; largest: {_places(bound)}"
    return StepVerdict(f"{resource}-bound", share, why)


def _elementwise(evidence: Evidence) -> StepVerdict | None:
    """Whether layers without products take most of the time.

    Moves in a layer with products are part of how these are computed.
    """
    ops = evidence.profile.operators
    with_products = {op.layer for op in ops if op.kind.startswith(PRODUCTS)}
    # Attention is a layer, whose products are in layers inside of it.
    with_products |= {layer.rpartition("/")[0] for layer in with_products}
    elementwise = [
        op for op in ops if op.layer not in with_products and op.phase in ("forward", "backward")
    ]
    share = _share_of_operators(evidence, elementwise)
    if share < ELEMENTWISE:
        return None
    by_layer: dict[str, float] = defaultdict(float)
    for op in elementwise:
        by_layer[op.layer or f"({op.phase})"] += op.ms
    layer, ms = max(by_layer.items(), key=lambda item: item[1])
    why = (
        f"{share:.0%} of the operators' time is in layers without products, above all "
        f"{_places(elementwise)}"
    )
    change = _without(evidence, ms, f"leave out or replace layer {layer}")
    named = None if layer.startswith("(") else layer
    return StepVerdict("elementwise-bound", share, why, change, layer=named)


def _operators(evidence: Evidence) -> StepVerdict:
    ops = evidence.profile.operators
    top = sorted(ops, key=lambda op: -op.ms)[:SHOWN]
    share = evidence.host.share(sum(op.ms for op in top))
    why = f"no limit holds for most of the step; slowest are {_places(top)}"
    return StepVerdict("operators", share, why)


RULES: tuple[Rule, ...] = (
    _recompiling,
    _data_bound,
    _callback_bound,
    _dispatch_bound,
    _host_bound,
    _event_bound,
    _converting,
    _elementwise,
    partial(_bound, "memory"),
    partial(_bound, "compute"),
    _operators,
)


def _find_limited(evidence: Evidence, *, by_memory: bool) -> Iterator[OperatorTime]:
    """Yield the operators that memory, or computation, limits."""
    peaks = evidence.profile.peaks
    if peaks is None:
        return
    for op in evidence.profile.operators:
        if op.of_flops is None or op.of_bytes is None:
            continue
        below = op.flops < peaks.ridge * op.nbytes
        large = op.nbytes > CACHE_BYTES * op.calls
        if by_memory and below and large and op.of_bytes > MEMORY_SHARE:
            yield op
        if not by_memory and op.of_flops > PEAK_SHARE:
            yield op


def _share_of_operators(evidence: Evidence, ops: Sequence[OperatorTime]) -> float:
    total_ms = sum(op.ms for op in evidence.profile.operators)
    return sum(op.ms for op in ops) / total_ms if total_ms else 0.0


def _mean(ops: Sequence[OperatorTime], name: str) -> float:
    """The mean of a share of the peaks, weighted by time."""
    ms = sum(op.ms for op in ops)
    return sum(op.ms * (getattr(op, name) or 0.0) for op in ops) / ms if ms else 0.0


def _places(ops: Sequence[OperatorTime]) -> str:
    """The layers, or operators outside of layers, in which some take longest."""
    spent: dict[str, float] = defaultdict(float)
    for op in ops:
        spent[op.layer or f"{op.name} ({op.phase})"] += op.ms
    ordered = sorted(spent.items(), key=lambda item: -item[1])[:SHOWN]
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in ordered)
