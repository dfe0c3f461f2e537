"""Verdict on a step: the first rule that applies, its evidence, and a change that would help.

Rules about data, host and dispatches come before rules about operators, since faster operators
don't help a step that waits for data. The thresholds were chosen on runs with a known limit
(`tests/verdicts.py`).
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Literal

from pipeline.backends.graph.hlo_program import CONVERSION_KIND
from pipeline.backends.loading.loader_stats import LoaderReport
from pipeline.inspect.profiler.profiled_executable import Compilation
from pipeline.inspect.profiler.step_profile import (
    HostTime,
    OperatorTime,
    Peaks,
    PredictedChange,
    StepProfile,
    StepVerdict,
)

COMPILATION_SHARE = 0.05
"""Share of a step from which compilations after the first dispatch limit it."""
MIN_COMPILATIONS = 3
"""Number of compilations from which a function counts as recompiled."""
WAIT_SHARE = 0.1
"""Share of a step above which waits for data limit it."""
SEVERE_WAIT_SHARE = 0.25
"""Share of a step from which waits for data limit it severely."""
CALLBACK_SHARE = 0.1
"""Share of a step above which the program's calls of Python limit it."""
HOST_SHARE = 0.2
"""Share of a step above which the host's work between dispatches limits it."""
MIN_GAIN = 1.1
"""Least gain of a longer sink if dispatches limit a run."""
EVENT_SHARE = 0.2
"""Share of the run above which evaluations and checkpoints limit it."""
CONVERSION_SHARE = 0.15
"""Share of a step above which conversions of types limit it."""
MEMORY_SHARE = 0.5
"""Share of the memory's bandwidth above which memory limits an operator."""
CACHE_BYTES = 8_000_000
"""Bytes up to which all operands of an operator may fit into a cache."""
PEAK_SHARE = 0.4
"""Share of the peak FLOP/s above which computation limits an operator."""
LIMITED_SHARE = 0.5
"""Share of the operators' time from which memory or computation limits a step."""
ELEMENTWISE_SHARE = 0.6
"""Share of the operators' time from which layers without products limit a step."""
MAX_NAMED = 2
"""A verdict names at most this many layers, operators or shapes."""
RESIDENT = "train.feed=resident"
PRODUCTS = ("matrix products", "convolutions")


@dataclass(frozen=True)
class SinkGain:
    """The fastest sink, measured with a few steps."""

    size: int
    step_ms: float
    """Predicted milliseconds a step in sinks of `size`."""
    now_ms: float
    """Milliseconds a step in the recipe's sinks, by the same measurement."""
    error: float = 0.0

    @property
    def gain(self) -> float:
        """Speed-up by sinks of `size`."""
        return self.now_ms / self.step_ms


@dataclass(frozen=True)
class EventCost:
    """Time of evaluations and checkpoints, in milliseconds per training step, and their count."""

    ms: float
    count: int


@dataclass(frozen=True)
class Evidence:
    """The input of the rules."""

    profile: StepProfile
    host: HostTime
    loader: LoaderReport
    sink_steps: int | None
    """Steps per sink in the recipe; None without sinks."""
    callbacks: tuple[str, ...] = ()
    compilations: tuple[Compilation, ...] = ()
    """Compilations during the timed steps."""
    compiled_steps: int = 0
    """Number of timed steps, over which the time of compilations is averaged."""
    sink: SinkGain | None = None
    events: EventCost | None = None
    faster_data: str = "convert the data once: python -m pipeline convert records"
    """Change that shortens the waits for data."""
    sink_key: str = "train.sink_size"
    """Name of the recipe key, or of the argument, that sets the steps per sink."""
    precision: str | None = "O0"
    """`train.precision` of the recipe; None for a custom step, which sets its types itself."""

    @property
    def step_ms(self) -> float:
        """Milliseconds of an untraced step, the host's work included."""
        return self.host.step


Rule = Callable[[Evidence], StepVerdict | None]


def decide(evidence: Evidence) -> StepVerdict:
    """Return the verdict of the first rule that applies; the last rule always does."""
    return next(filter(None, (rule(evidence) for rule in RULES)))


def _predict_saving(evidence: Evidence, ms: float, advice: str) -> PredictedChange:
    """Return a change, described by `advice`, that shortens a step by `ms`."""
    shorter_ms = max(evidence.step_ms - ms, 1e-6)
    gain = evidence.step_ms / shorter_ms
    return PredictedChange(advice, shorter_ms, gain, "counted from the trace")


def _find_recompiling(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if recompilations take a large share of the steps."""
    by_name: dict[str, list[Compilation]] = defaultdict(list)
    for compilation in evidence.compilations:
        by_name[compilation.name].append(compilation)
    # A function that first runs during training, such as an evaluation, compiles once or twice.
    by_name = {name: group for name, group in by_name.items() if len(group) >= MIN_COMPILATIONS}
    seconds = sum(compilation.seconds for group in by_name.values() for compilation in group)
    ms = 1000 * seconds / evidence.compiled_steps if evidence.compiled_steps else 0.0
    share = min(evidence.host.share(ms), 1.0)
    if share < COMPILATION_SHARE:
        return None
    name, group = max(by_name.items(), key=lambda item: sum(c.seconds for c in item[1]))
    shapes = list(dict.fromkeys(compilation.shapes for compilation in group if compilation.shapes))
    of_shapes = f", for {' then '.join(shapes[-MAX_NAMED:])}" if len(shapes) > 1 else ""
    reason = (
        f"{share:.0%} of a step is compiling after the first dispatch: {name or 'a program'} "
        f"{len(group)} times{of_shapes}"
    )
    change = _predict_saving(evidence, ms, "keep its shapes the same")
    return StepVerdict("recompiling", share, reason, change)


def _find_data_bound(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if steps wait for data."""
    host = evidence.host
    loader = evidence.loader
    share = host.share(host.wait)
    if share <= WAIT_SHARE:
        return None
    reason = f"{share:.0%} of a step, {host.wait:.3g} of {host.step:.3g} ms, waits for data"
    columns = sorted(loader.prepare_ms_per_step.items(), key=lambda item: -item[1])
    if columns:
        reason += f"; slowest is {columns[0][0]}, {columns[0][1]:.3g} ms a step to read"
    if loader.slowest_sample is not None:
        reason += f" (worst: {loader.slowest_sample})"
    change = _predict_saving(evidence, host.wait, evidence.faster_data)
    name = "data-bound" if share < SEVERE_WAIT_SHARE else "data-bound, severely"
    return StepVerdict(name, share, reason, change)


def _find_callback_bound(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if the program calls Python for a large share of a step."""
    calls = [call for call in evidence.profile.operators if call.kind == "calls of Python"]
    ms = sum(call.ms for call in calls)
    share = evidence.host.share(ms)
    if share <= CALLBACK_SHARE:
        return None
    slowest = max(calls, key=lambda call: call.ms)
    place = f"layer {slowest.layer}" if slowest.layer else f"the {slowest.phase} phase"
    count = sum(call.calls for call in calls)
    reason = f"{share:.0%} of a step is {count:g} calls of Python from the program, in {place}"
    change = _predict_saving(evidence, ms, f"compute {place} in JAX instead of the callback")
    return StepVerdict("callback-bound", share, reason, change, layer=slowest.layer or None)


def _find_dispatch_bound(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if the measurement found a longer sink to be faster."""
    sink = evidence.sink
    if sink is None or sink.gain < max(MIN_GAIN, 1 + 2 * sink.error):
        return None
    if evidence.sink_steps is not None and sink.size <= evidence.sink_steps:
        # A shorter sink saves no dispatches: the machine was busy.
        return None
    share = 1 - 1 / sink.gain
    size = evidence.sink_steps
    current_sinks = "no sinks" if size is None else f"sinks of {size:,}"
    reason = f"{share:.0%} of a step of {sink.now_ms:.3g} ms is dispatching {current_sinks}"
    advice = f"{evidence.sink_key}={sink.size}"
    advice += " train.sink=true" if size is None else ""
    # Not `_predict_saving`: the measurement of sinks leaves out callbacks between dispatches.
    change = PredictedChange(advice, sink.step_ms, sink.gain, "measured here")
    return StepVerdict("dispatch-bound", share, reason, change)


def _find_host_bound(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if callbacks between dispatches take a large share of a step."""
    host = evidence.host
    share = host.share(host.between)
    if share <= HOST_SHARE or not evidence.callbacks:
        return None
    callbacks = ", ".join(evidence.callbacks)
    reason = f"{share:.0%} of a step is the host between dispatches, with callbacks {callbacks}"
    advice = "do less in train.callbacks"
    return StepVerdict("host-bound", share, reason, _predict_saving(evidence, host.between, advice))


def _find_event_bound(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if evaluations and checkpoints take a large share of the run."""
    events = evidence.events
    if events is None:
        return None
    total_ms = evidence.step_ms + events.ms
    share = events.ms / total_ms
    if share <= EVENT_SHARE:
        return None
    reason = f"{share:.0%} of the run is {events.count:,} evaluations"
    half_ms = evidence.step_ms + events.ms / 2
    advice = "evaluate half as often, or half the samples (eval.samples)"
    change = PredictedChange(advice, half_ms, total_ms / half_ms, "counted")
    return StepVerdict("event-bound", share, reason, change)


def _find_converting(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if conversions of types take a large share of a step."""
    conversions = [op for op in evidence.profile.operators if op.kind == CONVERSION_KIND]
    ms = sum(op.ms for op in conversions)
    share = evidence.host.share(ms)
    if share <= CONVERSION_SHARE:
        return None
    is_custom = evidence.precision is None
    types = "the step does" if is_custom else f"train.precision={evidence.precision}"
    reason = (
        f"{share:.0%} of a step only converts types, {len(conversions)} operators, above all in "
        f"{_list_places(conversions)}: this device computes products in another type than {types}"
    )
    advice = "compute in float32" if is_custom else "train.precision=O0"
    return StepVerdict("converting", share, reason, _predict_saving(evidence, ms, advice))


def _find_bound(resource: Literal["memory", "compute"], evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if operators that one resource limits take most of the time."""
    peaks = evidence.profile.peaks
    if peaks is None:
        return None
    if resource == "memory":
        rate_field = "of_bytes"
        peak = f"{peaks.bytes_per_s / 1e9:.0f} GB/s"
    else:
        rate_field = "of_flops"
        peak = f"{peaks.flops / 1e9:.0f} GFLOP/s"
    bound = [op for op in evidence.profile.operators if _is_limited(op, resource, peaks)]
    share = _compute_operator_share(evidence, bound)
    if share < LIMITED_SHARE:
        return None
    mean = sum(op.ms * getattr(op, rate_field) for op in bound) / sum(op.ms for op in bound)
    places = _list_places(bound)
    reason = f"{share:.0%} of the operators' time is at {mean:.0%} of {peak}; largest: {places}"
    return StepVerdict(f"{resource}-bound", share, reason)


def _find_elementwise(evidence: Evidence) -> StepVerdict | None:
    """Return a verdict if layers without products take most of the time.

    A layer with products is left out whole, with its copies.
    """
    ops = evidence.profile.operators
    product_layers = {op.layer for op in ops if op.kind.startswith(PRODUCTS)}
    # The products of an attention layer are in its inner layers.
    product_layers |= {layer.rpartition("/")[0] for layer in product_layers}
    elementwise = [
        op for op in ops if op.layer not in product_layers and op.phase in ("forward", "backward")
    ]
    share = _compute_operator_share(evidence, elementwise)
    if share < ELEMENTWISE_SHARE:
        return None
    by_layer: dict[str, float] = defaultdict(float)
    for op in elementwise:
        by_layer[op.layer or f"({op.phase})"] += op.ms
    layer, ms = max(by_layer.items(), key=lambda item: item[1])
    reason = (
        f"{share:.0%} of the operators' time is in layers without products, above all "
        f"{_list_places(elementwise)}"
    )
    change = _predict_saving(evidence, ms, f"leave out or replace layer {layer}")
    named_layer = None if layer.startswith("(") else layer
    return StepVerdict("elementwise-bound", share, reason, change, layer=named_layer)


def _name_operators(evidence: Evidence) -> StepVerdict:
    """Return the verdict without a limit: the slowest operators."""
    top = sorted(evidence.profile.operators, key=lambda op: -op.ms)[:MAX_NAMED]
    share = evidence.host.share(sum(op.ms for op in top))
    reason = f"no limit holds for most of the step; slowest are {_list_places(top)}"
    return StepVerdict("operators", share, reason)


RULES: tuple[Rule, ...] = (
    _find_recompiling,
    _find_data_bound,
    _find_callback_bound,
    _find_dispatch_bound,
    _find_host_bound,
    _find_event_bound,
    _find_converting,
    _find_elementwise,
    partial(_find_bound, "memory"),
    partial(_find_bound, "compute"),
    _name_operators,
)


def _is_limited(op: OperatorTime, resource: Literal["memory", "compute"], peaks: Peaks) -> bool:
    """Whether memory, or computation, limits an operator."""
    if op.of_flops is None or op.of_bytes is None:
        return False
    if resource == "compute":
        return op.of_flops > PEAK_SHARE
    is_below_ridge = op.flops < peaks.ridge * op.nbytes
    exceeds_cache = op.nbytes > CACHE_BYTES * op.calls
    return is_below_ridge and exceeds_cache and op.of_bytes > MEMORY_SHARE


def _compute_operator_share(evidence: Evidence, ops: Sequence[OperatorTime]) -> float:
    total_ms = sum(op.ms for op in evidence.profile.operators)
    return sum(op.ms for op in ops) / total_ms if total_ms else 0.0


def _list_places(ops: Sequence[OperatorTime]) -> str:
    """Return the slowest layers, or operators outside of layers, with their times as text."""
    times_ms: dict[str, float] = defaultdict(float)
    for op in ops:
        times_ms[op.layer or f"{op.name} ({op.phase})"] += op.ms
    ordered = sorted(times_ms.items(), key=lambda item: -item[1])[:MAX_NAMED]
    return ", ".join(f"{name} {ms:.3g} ms" for name, ms in ordered)
