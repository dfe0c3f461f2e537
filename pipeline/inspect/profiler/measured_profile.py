"""Profile of a measured run, from its trace, its dispatches and its program."""

from __future__ import annotations

import os
import resource
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import jax
import numpy as np

from pipeline.backends.graph.hlo_program import HloProgram
from pipeline.backends.loading.loader_stats import LoaderReport
from pipeline.config.inspection_specs import ProfileSpec
from pipeline.core.host.measured_time import describe_load
from pipeline.inspect.profiler.profiled_executable import (
    Compilation,
    ProfiledExecutable,
    TimedDispatch,
)
from pipeline.inspect.profiler.step_profile import (
    TRIAD_BYTES,
    Coverage,
    HostTime,
    LayerTime,
    OperatorTime,
    Peaks,
    PhaseTime,
    StepProfile,
    peaks_of,
)
from pipeline.inspect.profiler.trace import (
    PHASES,
    IterationTimes,
    Traced,
    TracedOp,
    compute_iteration_times,
    find_median_iteration,
    split_trace,
)

WARM_SHARE = 0.25
"""Share of the untraced steps, at the start, that warm the process up and are left out."""
KIB = 1024
CONTRADICTION = 1.5
"""Ratio of an untraced step to a traced one from which the two contradict each other. A trace makes
a step longer."""
NOTABLE_SHARE = 0.02
"""Share of a step above which the rate of an operator is reliable."""


@dataclass(frozen=True)
class ProfiledRun:
    """A run that was traced."""

    name: str
    """Name of the recipe or of the step function."""
    batch_size: int
    spec: ProfileSpec
    device: str
    steps: int
    """Number of traced steps."""
    dispatches: tuple[TimedDispatch, ...]
    evaluations_s: tuple[tuple[float, float], ...]
    """Begin and end of each evaluation."""
    loader: LoaderReport
    data_bytes: int
    state_bytes: Mapping[str, int]
    compilations: tuple[Compilation, ...]
    memory: Mapping[str, int]
    """Bytes of the parts of the compiled program, as `program_memory` returns them."""
    program: HloProgram
    process_bytes: int = field(
        default_factory=lambda: resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * KIB
    )
    processors: int = field(default_factory=lambda: len(os.sched_getaffinity(0)))
    """Processors that the process may use."""
    foreign_cores: float = 0.0
    """Mean number of cores that other programs used while the run trained."""


def record_run(executable: ProfiledExecutable, **facts: Any) -> ProfiledRun:
    """Return the record of a traced run; `facts` are the fields that the executable lacks."""
    return ProfiledRun(
        steps=executable.last - executable.first,
        dispatches=tuple(executable.dispatches),
        evaluations_s=tuple(executable.evaluations_s),
        loader=executable.loader.report(),
        data_bytes=executable.loader.device_bytes,
        **facts,
    )


def measured_profile(
    run: ProfiledRun, peaks: Peaks, events: Sequence[TracedOp]
) -> tuple[StepProfile, Traced]:
    """Return the profile of a run and its traced operations, from the events of its trace."""
    spec = run.spec
    steps = run.steps
    traced = split_trace(events, run.program, steps, spec.fp_point, spec.bp_point)
    dispatches = [dispatch for dispatch in run.dispatches if dispatch.traced]
    between_s = sum(after.begin_s - before.end_s for before, after in _list_gaps(dispatches, run))
    traced_ms = 1000 * (sum(dispatch.seconds for dispatch in dispatches) + between_s) / steps
    iteration = find_median_iteration(compute_iteration_times(traced.iterations))
    host, doubts = _reconcile_host_time(run, iteration)
    # Traced times are scaled to the untraced step, since tracing lengthens short operations. A
    # trace of several dispatches includes the host's time between them.
    clock_ms = host.device + (host.between if len(dispatches) > 1 else 0.0)
    scale = clock_ms / traced.span_ns if traced.span_ns else 0.0
    operators = _list_operators(traced, steps, scale, peaks, count_host=spec.aicpu)
    parts_ns = sum(time.wall_ns for time in traced.times.values()) + traced.gap_ns
    busy_ns = sum(time.busy_ns for time in traced.times.values())
    operations = traced.operations
    named_ns = sum(t.busy_ns for name, t in traced.times.items() if operations[name].is_named)
    working_ns = traced.span_ns - traced.gap_ns
    nbytes = sum(op.nbytes for op in operators)
    shares = {"CPU": _compute_processor_share(run)}
    if host.step:
        shares["memory bandwidth"] = 1000 * nbytes / host.step / peaks.bytes_per_s
    profile = StepProfile(
        source="measured",
        device=run.device,
        recipe=run.name,
        batch_size=run.batch_size,
        steps=steps,
        step_ms=host.step,
        traced_step_ms=traced_ms,
        phases=_list_phases(traced, scale),
        layers=_list_layers(traced, operators, scale),
        operators=operators if spec.task_trace else (),
        iteration=iteration if spec.training_trace else None,
        points=traced.iterations if spec.training_trace else (),
        peaks=peaks,
        memory={
            **run.memory,
            **run.state_bytes,
            "data on the device": run.data_bytes,
            "process at its largest": run.process_bytes,
        },
        host=host,
        feed=asdict(run.loader),
        coverage=Coverage(
            named=named_ns / busy_ns if busy_ns else 0.0,
            parts_of_step=parts_ns / (1e6 * traced_ms * steps) if traced_ms else 0.0,
            overlap=busy_ns / working_ns if working_ns > 0 else 0.0,
        ),
        flops=sum(op.flops for op in operators),
        nbytes=nbytes,
        shares=shares,
        doubts=doubts,
    )
    return profile, traced


def _compute_processor_share(run: ProfiledRun) -> float:
    """Return the share of the processors' time that untraced dispatches use."""
    untraced = select_untraced(run.dispatches)
    cpu_s = sum(dispatch.cpu_s for dispatch in untraced)
    elapsed_s = sum(dispatch.seconds for dispatch in untraced)
    return cpu_s / elapsed_s / run.processors if elapsed_s else 0.0


def _reconcile_host_time(
    run: ProfiledRun, iteration: IterationTimes | None
) -> tuple[HostTime, tuple[str, ...]]:
    """Return the parts of an untraced step, at most as long in the program as a traced one, and the
    reasons why they may be wrong."""
    host = compute_host_time(run)
    doubts = list(filter(None, [describe_load(run.foreign_cores, run.processors)]))
    if iteration is not None and host.device > CONTRADICTION * iteration.iteration:
        doubts.append(
            f"untraced steps took {host.device:.4g} ms in the program and traced ones "
            f"{iteration.iteration:.4g}, though a trace makes them longer; the shorter time is used"
        )
        shorter_ms = iteration.iteration
        step_ms = shorter_ms + host.wait + host.between
        host = replace(host, device=shorter_ms, step=step_ms)
    return host, tuple(doubts)


def _list_gaps(
    dispatches: Sequence[TimedDispatch], run: ProfiledRun
) -> list[tuple[TimedDispatch, TimedDispatch]]:
    """Return the pairs of successive dispatches between which nothing was evaluated."""
    return [
        (before, after)
        for before, after in pairwise(dispatches)
        if after.start == before.stop
        and not any(before.end_s <= begin < after.begin_s for begin, _ in run.evaluations_s)
    ]


def select_untraced(dispatches: Sequence[TimedDispatch]) -> list[TimedDispatch]:
    """Return the untraced dispatches after the warm-up, at least the last."""
    untraced = [dispatch for dispatch in dispatches if not dispatch.traced]
    total_steps = sum(dispatch.steps for dispatch in untraced)
    skipped_steps = 0
    for place, dispatch in enumerate(untraced):
        if skipped_steps >= min(WARM_SHARE * total_steps, total_steps - dispatch.steps):
            first_timed = max(place, min(1, len(untraced) - 1))
            return untraced[first_timed:]
        skipped_steps += dispatch.steps
    return untraced[-1:]


def compute_host_time(run: ProfiledRun) -> HostTime:
    """Return the parts of an untraced step in ms: the median for `device`, means for the others."""
    untraced = select_untraced(run.dispatches)
    steps = sum(dispatch.steps for dispatch in untraced)
    device = _compute_median_ms([(item.seconds - item.wait_s, item.steps) for item in untraced])
    wait = 1000 * sum(dispatch.wait_s for dispatch in untraced) / max(1, steps)
    gaps = _list_gaps(untraced, run)
    gap_s = sum(after.begin_s - before.end_s for before, after in gaps)
    between = 1000 * gap_s / max(1, sum(after.steps for _, after in gaps))
    first_s = run.dispatches[0].end_s if run.dispatches else 0.0
    return HostTime(
        step=device + wait + between,
        device=device,
        wait=wait,
        between=between,
        dispatches=len(untraced),
        steps=steps,
        compile_s=sum((item.seconds for item in run.compilations if item.ended_s > first_s), 0.0),
    )


def _compute_median_ms(dispatches: Sequence[tuple[float, int]]) -> float:
    """Return the median ms per step, weighted by steps; `dispatches` are (seconds, steps)."""
    weights = [steps for _, steps in dispatches if steps]
    if not weights:
        return 0.0
    times = [1000 * seconds / steps for seconds, steps in dispatches if steps]
    return float(np.quantile(times, 0.5, weights=weights, method="inverted_cdf"))


def _list_operators(
    traced: Traced, steps: int, scale: float, peaks: Peaks, *, count_host: bool
) -> tuple[OperatorTime, ...]:
    rows = []
    for name, time in traced.times.items():
        operation = traced.operations[name]
        if operation.instruction.is_callback and not count_host:
            continue
        calls = time.calls / steps
        flops = operation.instruction.flops * calls
        nbytes = operation.instruction.moved_bytes * calls
        busy_s = time.busy_ns / steps / 1e9
        row = OperatorTime(
            name=operation.name,
            kind=operation.kind,
            layer=operation.layer,
            phase=operation.phase,
            calls=calls,
            ms=time.wall_ns * scale,
            share=time.wall_ns / traced.span_ns if traced.span_ns else 0.0,
            busy_ms=1000 * busy_s,
            flops=flops,
            nbytes=nbytes,
            of_flops=flops / busy_s / peaks.flops if busy_s else None,
            of_bytes=nbytes / busy_s / peaks.bytes_per_s if busy_s else None,
        )
        rows.append(row)
    return tuple(sorted(rows, key=lambda row: (-row.ms, row.name)))


def _list_phases(traced: Traced, scale: float) -> tuple[PhaseTime, ...]:
    wall_ns: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    busy_ns: dict[str, float] = dict.fromkeys(PHASES, 0.0)
    for name, time in traced.times.items():
        phase = traced.operations[name].phase
        wall_ns[phase] += time.wall_ns
        busy_ns[phase] += time.busy_ns
    wall_ns["between operators"] = traced.gap_ns
    span_ns = traced.span_ns or 1.0
    return tuple(
        PhaseTime(phase, ns * scale, ns / span_ns, busy_ns.get(phase, 0.0) * scale)
        for phase, ns in wall_ns.items()
    )


def _list_layers(
    traced: Traced, operators: Sequence[OperatorTime], scale: float
) -> tuple[LayerTime, ...]:
    sums_by_layer: dict[str, dict[str, float]] = defaultdict(lambda: defaultdict(float))
    for row in operators:
        sums = sums_by_layer[row.layer or f"({row.phase})"]
        sums[row.phase] += row.ms
        sums["flops"] += row.flops
        sums["bytes"] += row.nbytes
    span_ms = traced.span_ns * scale or 1.0
    layers = []
    for layer, sums in sums_by_layer.items():
        ms = sum(sums[phase] for phase in PHASES)
        layer_time = LayerTime(
            layer,
            ms,
            ms / span_ms,
            forward_ms=sums["forward"],
            backward_ms=sums["backward"],
            flops=sums["flops"],
            nbytes=sums["bytes"],
        )
        layers.append(layer_time)
    return tuple(sorted(layers, key=lambda layer: (-layer.ms, layer.layer)))


def bytes_of_tree(tree: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(tree))


def program_memory(program: Any) -> dict[str, int]:
    """Return the bytes of the parts of a compiled program; empty if XLA has no analysis."""
    analysis = getattr(program, "memory_analysis", lambda: None)()
    if analysis is None:
        return {}
    return {
        "temporaries": int(analysis.temp_size_in_bytes),
        "arguments": int(analysis.argument_size_in_bytes),
        "results": int(analysis.output_size_in_bytes),
        "machine code": int(analysis.generated_code_size_in_bytes),
    }


def profile_with_peaks(
    run: ProfiledRun, events: Sequence[TracedOp], device: jax.Device, folder: Path | None
) -> tuple[StepProfile, Traced]:
    """Return the profile with the device's peaks, measured again if an operator exceeds them."""
    profile, traced = measured_profile(run, peaks_of(device, folder), events)
    if exceeds_peaks(profile):
        # The machine was busy when the peaks were measured.
        return measured_profile(run, peaks_of(device, folder, again=True), events)
    return profile, traced


def exceeds_peaks(profile: StepProfile) -> bool:
    """Whether an operator with a notable share of the step is faster than the measured peaks.

    Bandwidth counts only if the operands don't fit into a cache.
    """
    return any(
        (op.of_flops or 0.0) > 1
        or ((op.of_bytes or 0.0) > 1 and op.nbytes > TRIAD_BYTES * op.calls)
        for op in profile.operators
        if op.share > NOTABLE_SHARE
    )
