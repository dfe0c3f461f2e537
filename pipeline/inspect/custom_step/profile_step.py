"""Profile of a custom step: how it spends its time, and what limits it."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, cast

from pipeline.backends.graph.hlo_program import parse_program
from pipeline.config.cache import cache_root
from pipeline.config.profile_spec import ProfileSpec
from pipeline.config.recipe import CacheSpec
from pipeline.core.errors import DataError, RunError
from pipeline.core.host.platforms import platform_of
from pipeline.engine.batches import IteratorBatches
from pipeline.engine.monitors.monitors import convert_write_errors
from pipeline.engine.run_sink import choose_size, compile_sink, prepare_sink
from pipeline.engine.schedule import RunSchedule
from pipeline.engine.sink_settings import SinkSettings
from pipeline.engine.user_step import SinkProgram, Step, copy_state
from pipeline.inspect.custom_step.open_step import OpenStep, open_step, run_steps, time_sinks
from pipeline.inspect.profiler.compilations import watch_compilations
from pipeline.inspect.profiler.measured_profile import (
    bytes_of_tree,
    profile_with_peaks,
    program_memory,
    record_run,
)
from pipeline.inspect.profiler.profile_files import ProfileReport, write_profile
from pipeline.inspect.profiler.profiled_executable import ProfiledExecutable
from pipeline.inspect.profiler.run_profile import (
    MAX_STEPS,
    SHORT_MS,
    choose_window,
    time_dispatched_step,
)
from pipeline.inspect.profiler.step_profile import HostTime, StepProfile
from pipeline.inspect.profiler.verdict import Evidence, SinkGain, decide
from pipeline.stages.autosink.dispatch_costs import (
    SINKS,
    compute_lower_quartile,
    estimate_gain_error,
)

SPEC = ProfileSpec(
    mode="only",
    start=None,
    steps=None,
    output=None,
    training_trace=True,
    task_trace=True,
    aicpu=True,
    fp_point=None,
    bp_point=None,
    aic_metrics="PipeUtilization",
)
"""Default settings of the command `profile`."""
MAX_SINK_STEPS = MAX_STEPS // 10
"""Most steps of a sink of the profiled run, which has several sinks to compare."""
ROUNDS = 5
TRIAL_MS = 150.0
"""Least time of a trial of a sink's size."""
FASTER_ITERATOR = "read batches faster: in several threads or processes, or from arrays"
FASTER_ARRAYS = "transfer less: smaller types, such as uint8, which the step converts"


def profile_step(
    step: Step,
    state: Any,
    data: Any,
    *,
    batch_size: int | None = None,
    size: int | Literal["auto", "all"] = "auto",
    output: str | Path | None = None,
) -> ProfileReport:
    """Profile `step(state, batch) -> (state, metrics)` as `pipeline.sink` runs it.

    The arguments are as for `pipeline.sink`; the state stays as it is. The report's text is a table
    with a verdict: what limits the step, and what would help. The files of the command `profile`
    are written into the folder `output`. From an iterator it reads 50 to 2,000 batches, and some
    more ahead.

    Raises ValueError, DataError and RunError as `pipeline.sink` does, and RunError for a device
    that can't be traced.
    """
    settings = SinkSettings(MAX_STEPS, size, None, batch_size)
    with open_step(prepare_sink(step, state, data, settings), MAX_STEPS) as opened:
        platform = opened.placement.device.platform
        if not platform_of(platform).is_traceable:
            raise RunError(f"profile: {platform} can't be traced; a cpu, gpu or tpu can")
        report = _trace_and_decide(opened)
    if output is not None:
        with convert_write_errors(output):
            write_profile(report, Path(output))
    return report


def _trace_and_decide(opened: OpenStep) -> ProfileReport:
    """Run and trace an open step, and return its profile and verdict."""
    prepared = opened.prepared
    state = copy_state(prepared.state, opened.placement)
    program, _ = compile_sink(prepared, state, opened.loader, None)
    size = choose_size(prepared.settings, None, program, state, opened.loader)
    schedule = RunSchedule(MAX_STEPS, MAX_STEPS, min(size, MAX_SINK_STEPS))
    hlo = parse_program(program.program_text)
    step_s = time_dispatched_step(cast(Any, program), cast(Any, program.put(state)), "loop")
    read_s = sum(opened.loader.report().prepare_ms_per_step.values()) / 1000
    window = choose_window(SPEC, schedule, hlo, max(step_s, read_s))
    profiled = ProfiledExecutable(cast(Any, program), window.first, window.steps, lambda: None)
    with watch_compilations() as watch:
        try:
            run_steps(profiled, program.put(state), replace(schedule, total=window.total))
        except DataError as error:
            if " ended after " not in str(error):
                raise
            advice = f"a profile of this step needs {window.total:,}; itertools.cycle repeats some"
            raise DataError(f"{error}; {advice}") from error
        finally:
            profiled.end_trace()
    if not profiled.traced:
        raise RunError(f"profile: the trace of {opened.device_text} has no operations")
    first_s = profiled.dispatches[0].end_s
    run = record_run(
        profiled,
        name=opened.name,
        batch_size=opened.batch_size,
        spec=SPEC,
        device=opened.device_text,
        state_bytes={"state": bytes_of_tree(prepared.state.state)},
        compilations=tuple(c for c in watch.compilations if first_s < c.ended_s),
        memory=program_memory(program.program),
        program=hlo,
    )
    folder = cache_root(CacheSpec(root=None, compiled=False))
    profile, operations = profile_with_peaks(run, profiled.traced, opened.placement.device, folder)
    evidence = _collect_evidence(opened, program, profile, size)
    return ProfileReport((evidence.profile,), decide(evidence), operations)


def _collect_evidence(
    opened: OpenStep, program: SinkProgram, profile: StepProfile, size: int
) -> Evidence:
    host = profile.host
    assert host is not None, "it was measured"
    report = opened.loader.report()
    has_iterator = isinstance(opened.prepared.source, IteratorBatches)
    if has_iterator:
        # The waits of the few windows aren't typical: the first was read during compilations.
        read_ms = report.prepare_ms_per_step["iterator"]
        wait = max(0.0, read_ms - host.device - host.between)
        host = replace(host, wait=wait, step=host.device + wait + host.between)
    evidence = Evidence(
        profile=replace(profile, host=host, step_ms=host.step),
        host=host,
        loader=report,
        sink_steps=size,
        faster_data=FASTER_ITERATOR if has_iterator else FASTER_ARRAYS,
        sink_key="size",
        precision=None,
    )
    if opened.loader.kind == "resident" and host.device < SHORT_MS:
        evidence = replace(evidence, sink=_measure_sink_gain(opened, program, host, size))
    return evidence


def _measure_sink_gain(
    opened: OpenStep, program: SinkProgram, host: HostTime, size: int
) -> SinkGain | None:
    """Compare sinks of `size` with those of "auto", in turns; None if the latter aren't longer."""
    prepared = opened.prepared
    state = copy_state(prepared.state, opened.placement)
    settings = replace(prepared.settings, size="auto")
    longer = choose_size(settings, None, program, state, opened.loader)
    if longer <= size:
        return None
    # The first sink, a third of the steps, isn't counted. Trials of long sinks are short, since the
    # size hardly matters above a few hundred steps.
    trial_steps = max(size + 1, min(longer, int(TRIAL_MS / host.step)))
    current_ms = []
    longer_ms = []
    for _ in range(ROUNDS):
        current_ms.append(time_sinks(program, state, size, SINKS * trial_steps).step_ms)
        longer_ms.append(time_sinks(program, state, trial_steps, SINKS * trial_steps).step_ms)
    error = estimate_gain_error(current_ms, longer_ms)
    return SinkGain(
        longer, compute_lower_quartile(longer_ms), compute_lower_quartile(current_ms), error
    )
