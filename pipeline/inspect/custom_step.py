"""Profile and forecast of a custom step, as `pipeline.sink` runs it."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing, contextmanager
from dataclasses import dataclass, replace
from itertools import repeat
from pathlib import Path
from typing import Any, Literal, cast

import jax
import jax.numpy as jnp
import numpy as np
from jax.extend.core import ClosedJaxpr

from pipeline.backends.base import Executable
from pipeline.backends.graph.hlo_program import parse_program
from pipeline.backends.loading.loader import Loader
from pipeline.backends.loading.window import Inputs, read_batch
from pipeline.backends.xla import XlaBackend
from pipeline.checkpoint.host_state import HostState
from pipeline.config.cache import cache_root
from pipeline.config.inspection_specs import ProfileSpec
from pipeline.config.recipe import CacheSpec
from pipeline.core.errors import DataError, RunError
from pipeline.core.files.atomic_write import convert_write_errors
from pipeline.core.host.measured_time import LoadWatch
from pipeline.core.host.platforms import get_platform
from pipeline.engine.batches import IteratorBatches, TooFewBatchesError
from pipeline.engine.history import History, NonFiniteStepError
from pipeline.engine.hooks import Hooks
from pipeline.engine.loop import Program, exhaust, train
from pipeline.engine.run_sink import (
    PreparedSink,
    choose_size,
    compile_sink,
    default_device,
    prepare_sink,
)
from pipeline.engine.schedule import RunSchedule, Schedule
from pipeline.engine.sink_settings import SinkSettings
from pipeline.engine.step_checks import LOSS
from pipeline.engine.user_step import (
    NO_RATES,
    CustomState,
    SinkProgram,
    Step,
    UserStep,
    copy_state,
    has_slow_loop,
    lower_step,
)
from pipeline.inspect.forecast.host_forecast import HOST_STEPS, HostForecast, time_parts
from pipeline.inspect.profiler.measured_profile import (
    bytes_of_tree,
    profile_with_peaks,
    program_memory,
    record_run,
)
from pipeline.inspect.profiler.profile_files import ProfileReport, write_profile
from pipeline.inspect.profiler.profiled_executable import ProfiledExecutable, watch_compilations
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
    DispatchClock,
    Timing,
    compute_lower_quartile,
    estimate_gain_error,
)
from pipeline.training.parallel.state_sharing import DevicePlacement

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
"""A sink of the profiled run has at most this many steps, so that there are several to compare."""
ROUNDS = 5
TRIAL_MS = 150.0
"""Target time of a sink when its size is tried."""
FASTER_ITERATOR = "read batches faster: in several threads or processes, or from arrays"
FASTER_ARRAYS = "transfer less: smaller types, such as uint8, which the step converts"


@dataclass(frozen=True)
class OpenStep:
    """A checked step, the device, and the loader of its batches."""

    prepared: PreparedSink
    placement: DevicePlacement
    loader: Loader

    @property
    def name(self) -> str:
        """Name of the step's function, or of its class if it is an object."""
        function = self.prepared.step.function
        return str(getattr(function, "__name__", type(function).__name__))

    @property
    def device_text(self) -> str:
        """The device, as the commands print it."""
        return XlaBackend(self.placement).describe()["device"]

    @property
    def batch_size(self) -> int:
        """Number of examples in a batch: the length of its first array, or 1."""
        first = jax.tree.leaves(self.prepared.source.spec)[0]
        return int(first.shape[0]) if first.shape else 1


@contextmanager
def open_step(prepared: PreparedSink, steps: int) -> Iterator[OpenStep]:
    """Open the data of at most `steps` steps, on the device that jax uses by default."""
    placement = DevicePlacement((default_device(),))
    with closing(prepared.source.open_loader(placement, 0, steps)) as loader:
        yield OpenStep(prepared, placement, loader)


def run_steps(
    executable: SinkProgram | ProfiledExecutable, state: CustomState, schedule: RunSchedule
) -> DispatchClock:
    """Run the steps of a schedule from step 0 in the engine's loop, without logs.

    The state is consumed. Returns the clock with the end of each dispatch. Raises RunError if a
    loss isn't finite.
    """
    watch = DispatchClock()
    program = Program(cast(Executable, executable))
    state_of_loop = cast(Any, state)
    hooks = Hooks(monitors=(watch,))
    history = History(0)
    try:
        exhaust(train(program, state_of_loop, Schedule(schedule), hooks, HostState(), history))
    except NonFiniteStepError as error:
        reason = f"{LOSS} isn't finite, so its steps can't be timed"
        raise RunError(f"step {history.step + 1}: {reason}") from error
    return watch


def time_sinks(program: SinkProgram, state: CustomState, sink_steps: int, steps: int) -> Timing:
    """Time steps in sinks, without the first sink. Raises RunError if a loss isn't finite."""
    schedule = RunSchedule(steps, steps, sink_steps)
    return run_steps(program, program.put(state), schedule).make_timing(sink_steps)


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

    The arguments are as for `pipeline.sink`; the state isn't changed. The report's text is a table
    with a verdict: what limits the step, and what would help. The files of the command `profile`
    are written into the folder `output`. An iterator is read for 50 to 2,000 batches, and
    some more ahead.

    Raises ValueError, DataError and RunError as `pipeline.sink` does, and RunError for a device
    that can't be traced.
    """
    settings = SinkSettings(MAX_STEPS, size, None, batch_size)
    with open_step(prepare_sink(step, state, data, settings), MAX_STEPS) as opened:
        platform = opened.placement.device.platform
        if not get_platform(platform).is_traceable:
            raise RunError(f"profile: {platform} can't be traced; a cpu, gpu or tpu can")
        if output is not None:
            # Before the measurement, which would be lost.
            with convert_write_errors(Path(output)):
                Path(output).mkdir(parents=True, exist_ok=True)
        report = _trace_and_decide(opened)
    if output is not None:
        with convert_write_errors(Path(output)):
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
    load = LoadWatch()
    with watch_compilations() as watch:
        try:
            run_steps(profiled, program.put(state), replace(schedule, total=window.total))
        except TooFewBatchesError as error:
            advice = f"a profile of this step needs {window.total:,}; itertools.cycle repeats some"
            raise DataError(f"{error}; {advice}") from error
        finally:
            profiled.end_trace()
    if not profiled.traced:
        raise RunError(f"profile: the trace of {opened.device_text} has no operations")
    # The program is compiled before the first dispatch ends; only later compilations are reported.
    first_s = profiled.dispatches[0].end_s
    run = record_run(
        profiled,
        name=opened.name,
        batch_size=opened.batch_size,
        spec=SPEC,
        device=opened.device_text,
        state_bytes={"state": bytes_of_tree(prepared.state.state)},
        compilations=tuple(item for item in watch.compilations if first_s < item.ended_s),
        memory=program_memory(program.program),
        program=hlo,
        foreign_cores=load.count_foreign_cores(),
    )
    folder = cache_root(CacheSpec(root=None, compiled=False))
    profile, operations = profile_with_peaks(run, profiled.traced, opened.placement.device, folder)
    evidence = _collect_evidence(opened, program, profile, size)
    return ProfileReport((evidence.profile,), decide(evidence), operations)


def _collect_evidence(
    opened: OpenStep, program: SinkProgram, profile: StepProfile, size: int
) -> Evidence:
    """Return the measurements that decide the verdict; `size` is the steps of a sink."""
    host = profile.host
    assert host is not None, "a measured profile has it"
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
    """Time sinks of `size` steps and of "auto" in turns; None if sinks of "auto" aren't longer."""
    prepared = opened.prepared
    state = copy_state(prepared.state, opened.placement)
    settings = replace(prepared.settings, size="auto")
    longer = choose_size(settings, None, program, state, opened.loader)
    if longer <= size:
        return None
    # Trials of long sinks are short: the size hardly matters above a few hundred steps.
    trial_steps = max(size + 1, min(longer, int(TRIAL_MS / host.step)))
    current_ms = []
    longer_ms = []
    for _ in range(ROUNDS):
        current_ms.append(time_sinks(program, state, size, SINKS * trial_steps).step_ms)
        longer_ms.append(time_sinks(program, state, trial_steps, SINKS * trial_steps).step_ms)
    error = estimate_gain_error(current_ms, longer_ms)
    step_ms = compute_lower_quartile(longer_ms)
    return SinkGain(longer, step_ms, compute_lower_quartile(current_ms), error)


def forecast_step(step: Step, state: Any, batch: Any) -> HostForecast:
    """Forecast the time of `step(state, batch) -> (state, metrics)` here, without compiling it.

    It is the sum of the times of the step's parts, as in the command `forecast`. `state` and
    `batch` are arrays or trees of arrays, and aren't changed.

    Raises ValueError for a step or a state that `pipeline.sink` refuses, and DataError for a batch
    that it refuses.
    """
    prepared = prepare_sink(step, state, repeat(batch), SinkSettings(HOST_STEPS, 1))
    with open_step(prepared, HOST_STEPS) as opened:
        device = opened.placement.device
        lowered, _ = lower_step(prepared.step, prepared.spec, device, None)
        program = _trace_step(lowered, prepared.state, opened.loader.get_window(0).inputs)
        looped = not has_slow_loop(prepared.step, prepared.spec, device)
        device_times = time_parts(program, device, looped=looped)
        dtypes = {leaf.dtype for leaf in jax.tree.leaves(prepared.spec)}
        float_types = sorted(dtype.name for dtype in dtypes if jnp.issubdtype(dtype, jnp.floating))
        return HostForecast(
            recipe=opened.name,
            device=opened.device_text,
            precision=", ".join(float_types) or "no floating point",
            host_ms=_measure_host_ms(opened),
            **device_times,
        )


def _trace_step(step: UserStep, state: CustomState, inputs: Inputs) -> ClosedJaxpr:
    """Trace a step as in the body of the loop, which also reads its batch from the window."""

    def compute(state: CustomState, inputs: Inputs, position: Any) -> Any:
        new_state, row = step(state, read_batch(inputs, position), jnp.asarray(NO_RATES))
        return new_state, tuple(row)

    return jax.make_jaxpr(compute)(state, inputs, np.int32(0))


def _measure_host_ms(opened: OpenStep) -> float:
    """Return the milliseconds of an empty step: the host's time for each step."""
    user_step = opened.prepared.step
    metrics = dict.fromkeys(user_step.signature.metrics, np.float32(0))

    def do_nothing(state: Any, batch: Any) -> tuple[Any, dict[str, Any]]:
        return state, metrics

    idle = replace(user_step, function=do_nothing)
    state = copy_state(opened.prepared.state, opened.placement)
    program = SinkProgram(idle, state, opened.loader, opened.placement, single_steps=True)
    steps = opened.loader.get_window(0).stop
    return float(time_sinks(program, state, 1, steps).dispatch_ms.min())
