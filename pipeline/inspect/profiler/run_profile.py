"""Profile of a run: the choice of the traced steps, and the report after training."""

from __future__ import annotations

import time
from collections.abc import Collection, Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, replace
from functools import partial

from pipeline.backends.base import Estimate, Executable, Mechanism
from pipeline.backends.graph.hlo_program import FREE, HloProgram, parse_program
from pipeline.backends.loading.loader import RESIDENT_LIMIT_BYTES
from pipeline.backends.sink_choice import choose, predict_ms
from pipeline.config.cache import cache_root
from pipeline.config.inspection_specs import LEAST_STEPS, ProfileSpec
from pipeline.config.recipe import Recipe
from pipeline.config.resolved_settings import list_event_periods, resolve_level
from pipeline.core.errors import RecipeError, RunError, first_line
from pipeline.core.files.atomic_write import convert_write_errors
from pipeline.core.files.name_text import find_nearest, show_name
from pipeline.core.host.measured_time import LoadWatch
from pipeline.core.host.platforms import get_platform
from pipeline.data.columns import count_split_bytes
from pipeline.data.inputs import Dataset
from pipeline.engine.schedule import Event, RunSchedule
from pipeline.inspect.profiler.ascend_profile import modelled_profile
from pipeline.inspect.profiler.measured_profile import (
    ProfiledRun,
    bytes_of_tree,
    profile_with_peaks,
    program_memory,
    record_run,
    select_untraced,
)
from pipeline.inspect.profiler.profile_files import (
    ProfileRecord,
    make_report,
    write_profile,
    write_record,
)
from pipeline.inspect.profiler.profiled_executable import (
    Compilations,
    ProfiledExecutable,
    watch_compilations,
)
from pipeline.inspect.profiler.step_profile import StepProfile
from pipeline.inspect.profiler.trial import try_change
from pipeline.inspect.profiler.verdict import RESIDENT, EventCost, Evidence, SinkGain, decide
from pipeline.stages.autosink.choose_sink import list_mechanisms, make_bounds
from pipeline.stages.autosink.dispatch_costs import (
    TimedRuns,
    count_least_steps,
    measure,
    time_evaluation,
    time_single_step,
)
from pipeline.stages.autosink.sink_plan import SinkPlan
from pipeline.stages.record.run_directory import PROFILE, RANKS
from pipeline.stages.runner.context import BuiltRun, CompiledRun
from pipeline.stages.runner.run_feature import RunFeature
from pipeline.training.state import TrainState

STEPS = 60
"""At most this many steps are traced, unless `profile.steps` is set."""
MAX_EVENTS = 100_000
"""A trace has at most this many events. 20 times the number take minutes to write and to read."""
TRACED_S = 2.0
"""Target duration of the traced steps."""
TRAINED_S = 2.5
"""Target duration of all steps, in a run with `profile.mode = only`."""
MAX_STEPS = 2000
"""A run with `profile.mode = only` has at most this many steps."""
WARM_STEPS = 10
"""Least steps before the traced steps, unless `profile.start` is set."""
TIMED_SINGLE_STEPS = 2
"""Steps that are timed one by one before a run with `profile.mode = only`."""
SHORT_MS = 20.0
"""Length of a step from which longer sinks aren't tried, since its dispatch costs little."""
SINKS_S = 1.0
"""Duration of the measurement of sinks."""


def require_profilable(recipe: Recipe, platform: str) -> None:
    """Raise RecipeError if a run can't be profiled."""
    problems = []
    if not get_platform(platform).is_traceable:
        problems.append(f"profile: {platform} can't be traced; a cpu, gpu or tpu can")
    if recipe.profile.mode == "only" and recipe.train.resume is not None:
        problems.append(
            f"train.resume = {recipe.train.resume}: must be null with profile.mode=only, which "
            "would end that run; profile.mode=on profiles it while it continues"
        )
    if "train" not in recipe.stages:
        problems.append(f"stages = {list(recipe.stages)}: must have train, whose steps are traced")
    if problems:
        raise RecipeError(problems)


class RunProfile(RunFeature):
    """The profile of a run with `profile.mode`."""

    _total_steps: int
    """The run's length before it was shortened."""
    _profiler: RunProfiler | None = None
    """None before the steps to trace are chosen, and in a resumed run with too few steps."""

    def shorten(self, built_run: BuiltRun) -> BuiltRun:
        """Shorten a run with `profile.mode = only`. Raises RecipeError if it can't be profiled."""
        recipe = built_run.context.recipe
        require_profilable(recipe, built_run.backend.device.platform)
        built = built_run.built
        schedule = built.run_schedule
        self._total_steps = schedule.total
        if recipe.profile.mode != "only":
            return built_run
        schedule = replace(schedule, total=min(schedule.total, MAX_STEPS))
        return replace(built_run, built=replace(built, run_schedule=schedule))

    def prepare(self, run: CompiledRun, sink: SinkPlan, step: int) -> CompiledRun:
        """Choose the steps to trace after the first `step` steps.

        Raises RecipeError if the run has too few steps. A resumed run continues without a profile
        instead.
        """
        schedule = run.built.run_schedule
        if run.context.deadline.stop_at is None:
            schedule = replace(schedule, total=self._total_steps)
        try:
            self._profiler = RunProfiler(run, schedule, step)
        except RecipeError as error:
            if run.context.recipe.profile.mode == "only" or not step:
                raise
            # Too few steps remain; the run may have been profiled before it was resumed.
            run.context.reporter.warn(error.problems[0])
            return run
        return self._profiler.run

    @contextmanager
    def train(self, run: CompiledRun) -> Iterator[None]:
        """Record compilations while the run trains, and end a running trace afterwards."""
        with nullcontext() if self._profiler is None else self._profiler.open():
            yield

    def conclude_training(
        self, run: CompiledRun, estimate: Estimate | None, state: TrainState
    ) -> None:
        """Write the profile. With `profile.mode = on` a failure is only a warning."""
        if self._profiler is not None:
            self._profiler.conclude(estimate, state)


def time_dispatched_step(executable: Executable, state: TrainState, mechanism: Mechanism) -> float:
    """Return the approximate seconds of a step that is dispatched alone; the state is consumed."""
    times = []
    for _ in range(TIMED_SINGLE_STEPS):
        began = time.perf_counter()
        state, _ = executable.run(state, 0, 1, mechanism)
        times.append(time.perf_counter() - began)
    return min(times)


@dataclass(frozen=True)
class TracedSteps:
    """The traced steps: `first + 1 .. first + steps`, of a run of `total` steps."""

    first: int
    steps: int
    total: int


class RunProfiler:
    """The profiler of a run; its `run` has the executable that traces, and the final schedule."""

    def __init__(self, run: CompiledRun, schedule: RunSchedule, done: int) -> None:
        """Choose the steps to trace; `schedule` is the run's before it was shortened."""
        self._recipe = run.context.recipe
        self._schedule = schedule
        self._reporter = run.context.reporter
        self._plain = run.executable  # without tracing
        self._ranks = run.context.ranks
        self._program: HloProgram = parse_program(self._plain.program_text)
        spec = self._recipe.profile
        step_s = None
        if spec.mode == "only":
            measured_s = time_dispatched_step(self._plain, self._plain.init(), "none")
            step_s = self._ranks.agree(lambda: measured_s)
        window = choose_window(spec, run.built.run_schedule, self._program, step_s, done)
        self._window = window
        self._watch = Compilations()
        self._foreign_cores = 0.0
        text = f"steps {window.first + 1:,} to {window.first + window.steps:,} are traced"
        notify = partial(self._reporter.print_stage, "profile", text)
        self.executable = ProfiledExecutable(self._plain, window.first, window.steps, notify)
        built = replace(run.built, run_schedule=replace(run.built.run_schedule, total=window.total))
        self.run = replace(run, built=built, executable=self.executable)

    @contextmanager
    def open(self) -> Iterator[None]:
        """Record compilations while the run trains, and end a running trace afterwards."""
        load = LoadWatch()
        with watch_compilations() as self._watch:
            try:
                yield
            finally:
                self.executable.end_trace()
                self._foreign_cores = load.count_foreign_cores()

    def conclude(self, estimate: Estimate | None, state: TrainState) -> None:
        """Write the profile. With `profile.mode = on` a failure is only a warning."""
        try:
            self._write_report(estimate, state)
        except Exception as error:  # a trace is read from files of another library
            if self._recipe.profile.mode == "only":
                raise
            self._reporter.warn(f"no profile: {first_line(error)}")

    def _write_report(self, estimate: Estimate | None, state: TrainState) -> None:
        """Print the profile and write its files. Raises RecipeError and RunError."""
        dataset = self.run.dataset
        backend = self.run.backend
        traced_steps = sum(call.steps for call in self.executable.dispatches if call.traced)
        if self.executable.traced is None or traced_steps < self._window.steps:
            # The run was stopped, or ended early.
            raise RunError(
                f"profile: the run ended after {traced_steps} of {self._window.steps} traced steps"
            )
        device = backend.describe()["device"]
        if not self.executable.traced:
            problem = f"the trace of {device} has no operations, so there is nothing to show"
            raise RecipeError([f"profile: {problem}"])
        recipe = self._recipe
        with self._reporter.clock("reading the trace"):
            memory = program_memory(getattr(getattr(self._plain, "programs", None), "train", None))
            # Compilations between the ends of the first and the last dispatch.
            ends_s = [dispatch.end_s for dispatch in self.executable.dispatches]
            run = record_run(
                self.executable,
                name=recipe.name,
                batch_size=recipe.train.batch_size,
                spec=recipe.profile,
                device=device,
                state_bytes={
                    "parameters": bytes_of_tree(state.params),
                    "optimizer": bytes_of_tree(state.opt_state),
                },
                compilations=tuple(
                    c for c in self._watch.compilations if ends_s[0] < c.ended_s < ends_s[-1]
                ),
                memory=memory,
                program=self._program,
                foreign_cores=self._foreign_cores,
            )
            events = self.executable.traced
            cache_dir = cache_root(recipe.cache)
            profile, operations = profile_with_peaks(run, events, backend.device, cache_dir)
            for problem in list_unknown_points(recipe.profile, operations.times):
                self._reporter.warn(problem)
            evidence = self._collect_evidence(run, profile, state)
            verdict = decide(evidence)
            if self._ranks.size == 1:
                verdict = try_change(verdict, recipe, dataset, backend, self._plain, evidence)
        record = ProfileRecord(run, evidence, verdict, modelled_profile(recipe, estimate))
        report = make_report(record, evidence, operations)
        folder = recipe.profile.output or self.run.context.run_dir / PROFILE
        if not self._ranks.is_first:
            folder = folder / RANKS / str(self._ranks.rank)
        with convert_write_errors(folder):
            write_profile(report, folder)
            write_record(record, self.executable.raw, folder)
        self._reporter.print_lines(str(report))
        text = f"table, profile.json, trace.json and picture in {folder}"
        self._reporter.print_stage("profile", text)

    def _collect_evidence(
        self, run: ProfiledRun, profile: StepProfile, state: TrainState
    ) -> Evidence:
        """Return the measurements that decide the verdict; some are made here, on `state`."""
        recipe = self._recipe
        dataset = self.run.dataset
        host = profile.host
        assert host is not None, "a measured profile has it"
        dispatches = self.executable.dispatches
        loader = self._plain.loader
        loader_report = loader.report()
        is_alone = self._ranks.size == 1
        if is_alone and loader.kind == "stream" and loader_report.wait_ms_per_step is None:
            # The run read only short first windows, and read ahead for steps that it did not run.
            host = replace(host, wait=self._measure_starved_ms(host.device))
            host = replace(host, step=host.device + host.wait + host.between)
        # The dispatches whose time is reported. A short run may have only traced ones.
        timed = select_untraced(dispatches) or dispatches
        first_s = timed[0].end_s
        last_s = timed[-1].end_s
        fits_on_device = count_split_bytes(dataset.train) <= RESIDENT_LIMIT_BYTES
        evidence = Evidence(
            profile=replace(profile, host=host, step_ms=host.step),
            host=host,
            loader=loader_report,
            sink_steps=self._schedule.sink_steps if recipe.train.sink else None,
            callbacks=tuple(spec.name for spec in recipe.train.callbacks),
            compilations=tuple(c for c in run.compilations if first_s < c.ended_s < last_s),
            compiled_steps=timed[-1].stop - timed[0].stop,
            precision=resolve_level(recipe),
        )
        if recipe.train.feed == "stream" and fits_on_device:
            evidence = replace(evidence, faster_data=RESIDENT)
        if not is_alone:
            # Each process would measure another number of steps, and they wait for each other.
            return evidence
        if loader.kind == "resident" and host.device < SHORT_MS:
            evidence = replace(evidence, sink=self._measure_sink_gain())
        events = self._measure_event_cost(dataset, state)
        if events is None:
            return evidence
        host = replace(host, events=events.ms)
        profile = replace(evidence.profile, host=host)
        return replace(evidence, profile=profile, host=host, events=events)

    def _measure_starved_ms(self, device_ms: float) -> float:
        """Return the ms that a step waits for data: the reader's time minus the device's."""
        # The first window is read again: imports and compilations slowed its first reading.
        loader = self._plain.loader
        loader.close()
        waited_s = loader.waited_s
        try:
            window = loader.get_window(0)
        finally:
            loader.close()
        read_ms = 1000 * (loader.waited_s - waited_s) / max(1, window.stop - window.start)
        return max(0.0, read_ms - device_ms)

    def _measure_sink_gain(self) -> SinkGain | None:
        """Measure the fastest sink; return None unless it is faster than no sinks."""
        recipe = self._recipe
        schedule = self._schedule
        mechanisms = list_mechanisms(recipe.train.mechanism, self._plain)
        if count_least_steps(mechanisms) > schedule.total:
            return None
        try:
            with TimedRuns(recipe, schedule, self._plain, is_terminal=False) as trials:
                single_ms = time_single_step(trials)
                bounds = make_bounds(recipe, schedule, self._plain)
                costs, _ = measure(trials, single_ms, mechanisms, SINKS_S)
        except RunError:
            # The steps of the measurement may diverge.
            return None
        finally:
            self._plain.loader.close()
        choice = choose(costs, bounds)
        if choice.size is None or choice.gain <= 1 + costs.error:
            return None
        now_ms = costs.off_ms
        if recipe.train.sink and schedule.sink_steps is not None:
            now_ms = predict_ms(costs.find(choice.mechanism), schedule.sink_steps, bounds)
        return SinkGain(choice.size, choice.step_ms, now_ms, costs.error)

    def _measure_event_cost(self, dataset: Dataset, state: TrainState) -> EventCost | None:
        """Return the cost of evaluations per training step; a part of one evaluation is timed."""
        recipe = self._recipe
        schedule = self._schedule
        periods = list_event_periods(recipe, schedule.steps_per_epoch)[Event.EVALUATE]
        total = schedule.total
        count = len({step for period in periods for step in range(period, total + 1, period)})
        batches = dataset.eval_order.steps_per_epoch
        if not count or not batches:
            return None
        self.executable.evaluate(state, 0, 1)
        evaluation_ms = 1000 * time_evaluation(self.executable, state, batches)
        return EventCost(evaluation_ms * count / total, count)


def list_unknown_points(spec: ProfileSpec, operators: Collection[str]) -> list[str]:
    """Return a message for each point of an iteration that isn't among the traced operators."""
    messages = []
    for key, name in (("fp_point", spec.fp_point), ("bp_point", spec.bp_point)):
        if name and name not in operators:
            guess = find_nearest(name, operators)
            question = f"did you mean {show_name(guess)}? " if guess else ""
            problem = f"profile.{key} = {show_name(name)}: the table has no such operator"
            messages.append(f"{problem}; {question}The point is chosen automatically")
    return messages


def choose_window(
    spec: ProfileSpec,
    schedule: RunSchedule,
    program: HloProgram,
    step_s: float | None,
    done: int = 0,
) -> TracedSteps:
    """Choose the steps to trace, after the `done` steps of a resumed run.

    `step_s` is the seconds of a step, and shortens the run; None leaves its length. Raises
    RecipeError if the run is too short.
    """
    steps = spec.steps
    if steps is None:
        num_executed = sum(op.opcode not in FREE for op in program.instructions.values())
        steps = min(STEPS, MAX_EVENTS // max(1, num_executed))
        if step_s:
            steps = min(steps, int(TRACED_S / step_s))
        steps = max(LEAST_STEPS, steps)
    sink = schedule.sink_steps or 1
    total = schedule.total
    train_steps = int(TRAINED_S / step_s) if step_s else total - done
    if spec.start is not None:
        first = done + spec.start
    else:
        # The first sink warms the process up, unless it is most of the run.
        first = done + max(WARM_STEPS, min(sink, train_steps // 2, total - done - 2 * steps))
    if step_s:
        total = min(total, done + max(first - done + 2 * steps, train_steps))
    if first + steps > total:
        raise RecipeError(
            [
                f"profile: the run has {schedule.total:,} steps, too few to profile: "
                f"{steps} are traced after the first {first}; train longer, or set profile.start "
                f"and profile.steps ({LEAST_STEPS} at least)"
            ]
        )
    return TracedSteps(first, steps, total)
